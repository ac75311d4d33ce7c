"""Importing this registers the c10d backend "smddp", and sets RANK and the like under mpirun."""

import smddp  # noqa: F401
from smddp_launch import complete_from_launcher

# Scripts read LOCAL_RANK or SMDATAPARALLEL_LOCAL_RANK before they call init_process_group().
complete_from_launcher()
