"""Starting under any launcher, logging, saving and resuming, noticing what is wrong."""
