"""Starting under any launcher, logging, saving and resuming, noticing what is wrong."""
import interface.packages  # noqa: F401 (where one is missing, one line says what to type)
