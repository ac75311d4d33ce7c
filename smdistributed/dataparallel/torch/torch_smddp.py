"""Importing this registers the c10d backend "smddp", and sets RANK and the like under mpirun."""

from smddp.launch.environment import complete_from_launcher
from smddp.torch import functions  # noqa: F401

# Scripts read LOCAL_RANK or SMDATAPARALLEL_LOCAL_RANK before they call init_process_group().
complete_from_launcher()
