"""The variables of a rank: those that torch reads, from those that mpirun and srun set.

Each `import torch` loads this module where smddp is installed, so it imports little.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from smddp.launch.slurm import tasks_of_this_node, tasks_without_step

__all__ = [
    "complete_environment",
    "complete_from_launcher",
    "first_of",
    "instead_of",
    "is_bare_rank",
    "print_lines_at_once",
    "sources",
]

# init_process_group() reads torchrun's names. mpirun and srun set the variables on the right; the
# first one that is set counts. SLURM_NTASKS may be that of the job, as in the shell that salloc
# starts, which is a step of one task.
_FROM_LAUNCHERS = {
    "RANK": ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"),
    "WORLD_SIZE": ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
    "LOCAL_RANK": ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"),
    "LOCAL_WORLD_SIZE": ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
}
_RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_REPLACEABLE = ("gloo", "mpi")


def is_bare_rank() -> bool:
    """Returns whether mpirun or srun started this process, and it lacks variables of torch."""
    return any(name in os.environ for name in _FROM_LAUNCHERS["RANK"]) and not all(
        name in os.environ for name in _RENDEZVOUS
    )


def sources(name: str) -> list[str]:
    """Returns the variables of launchers that stand for one of torch here."""
    # A script of one task may be a job of one rank.
    of_slurm = tasks_without_step() < 2
    return [each for each in _FROM_LAUNCHERS[name] if of_slurm or not each.startswith("SLURM_")]


def first_of(names: Sequence[str]) -> str:
    """Returns the first of these variables that is not empty; "" if none is set."""
    return next((os.environ[name] for name in names if os.environ.get(name)), "")


def complete_from_launcher() -> None:
    """Sets RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE where they are absent."""
    counts = os.environ.get("SLURM_LOCALID") and tasks_without_step() < 2
    for name in _FROM_LAUNCHERS:
        value = first_of(sources(name)) or None
        if value is None and name == "LOCAL_WORLD_SIZE" and counts:
            value = tasks_of_this_node()
        if value is not None:
            os.environ.setdefault(name, value)
    if local := os.environ.get("LOCAL_RANK"):
        os.environ.setdefault("SMDATAPARALLEL_LOCAL_RANK", local)


def complete_environment(rank: int, size: int) -> None:
    """Does the same when a group is created.

    A script that was started by hand has no local rank; its rank in the group is used instead.

    Args:
        rank: this rank in the group.
        size: number of ranks of the group.
    """
    complete_from_launcher()
    if size > 0:
        os.environ.setdefault("SMDATAPARALLEL_LOCAL_RANK", str(rank))


def instead_of(text: str) -> frozenset[str]:
    """Returns the backends of a value of SMDDP_INSTEAD_OF, such as "gloo,mpi".

    Raises:
        ValueError: it names another one.
    """
    names = [name.strip().lower() for name in text.split(",") if name.strip()]
    if wrong := [name for name in names if name not in _REPLACEABLE]:
        raise ValueError(
            f"SMDDP_INSTEAD_OF={text}: expects {' or '.join(_REPLACEABLE)}, or both joined by a "
            f"comma, not {wrong[0]}"
        )
    return frozenset(names)


def print_lines_at_once() -> None:
    """Lets a rank of smddprun write each line when it is printed, and not 8 KiB later.

    Python would wait, because the output of a rank goes to a file, which torchrun copies to that of
    smddprun; and what a rank has not written is lost if it is killed. PYTHONUNBUFFERED is no help:
    it writes parts of lines, and torchrun puts the rank's number before each.
    """
    import io

    if "SMDDPRUN" in os.environ and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
