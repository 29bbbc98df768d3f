"""Starting under any launcher, logging, saving and resuming, noticing what is wrong."""
from interface.packages import check_packages

check_packages()  # where they are not installed, one line says what to type
