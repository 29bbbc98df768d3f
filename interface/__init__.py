"""Where a program meets its user and its disk: flags, layouts, JSON that is checked, the files of a run."""
