"""Parameters, bytes sent, bytes kept, milliseconds: known before a run."""
