"""Variables that scripts written for the original library read, set where the launcher did not."""

from __future__ import annotations

import os

# mpirun and srun name the rest differently, in the order in which they are believed;
# init_process_group() reads torchrun's names.
_FROM_LAUNCHERS = {
    "RANK": ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"),
    "WORLD_SIZE": ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS"),
    "LOCAL_RANK": ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"),
    "LOCAL_WORLD_SIZE": ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE"),
}


def complete_from_launcher() -> None:
    """Sets what is absent of RANK, WORLD_SIZE and their local counterparts."""
    for name, sources in _FROM_LAUNCHERS.items():
        value = next((os.environ[s] for s in sources if os.environ.get(s)), None)
        if value is not None:
            os.environ.setdefault(name, value)
    if local := os.environ.get("LOCAL_RANK"):
        os.environ.setdefault("SMDATAPARALLEL_LOCAL_RANK", local)


def complete_environment(rank: int, size: int) -> None:
    """The same once a group exists; a script started by hand has no local rank but its rank."""
    complete_from_launcher()
    if size > 0:
        os.environ.setdefault("SMDATAPARALLEL_LOCAL_RANK", str(rank))
