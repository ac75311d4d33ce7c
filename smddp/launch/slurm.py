"""What Slurm tells a process: its step, the tasks of its job, and their nodes."""

from __future__ import annotations

import os
import re

__all__ = [
    "first_node",
    "is_shell_of_slurm",
    "step_of_slurm",
    "tasks_of_this_node",
    "tasks_without_step",
]

_INTERACTIVE_STEP = "4294967290"  # of the shell of salloc, SLURM_INTERACTIVE_STEP in slurm.h


def step_of_slurm() -> str:
    """Returns the number of the step of Slurm that this process belongs to; "" if to none."""
    return os.environ.get("SLURM_STEP_ID") or os.environ.get("SLURM_STEPID", "")


def tasks_without_step() -> int:
    """Returns how many tasks a job of Slurm has, if srun has not started this process; else 0.

    So it is in a batch script, and in the shell of salloc. There SLURM_NTASKS is that of the job,
    and SLURM_PROCID may be 0; but no srun starts the other tasks beside this process.
    """
    tasks = os.environ.get("SLURM_NTASKS", "")
    return int(tasks) if tasks.isdecimal() and not step_of_slurm() else 0


def is_shell_of_slurm() -> bool:
    """Returns whether this process is in a batch script or the shell of salloc, and no rank."""
    launchers = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "TORCHELASTIC_RUN_ID")
    if "SLURM_JOB_ID" not in os.environ or any(name in os.environ for name in launchers):
        return False
    return step_of_slurm() in ("", _INTERACTIVE_STEP)


def tasks_of_this_node() -> str | None:
    """Returns how many tasks of the job step this node has, from a list such as "4(x2),3"."""
    text = os.environ.get("SLURM_STEP_TASKS_PER_NODE") or os.environ.get("SLURM_TASKS_PER_NODE")
    if not text:
        return os.environ.get("SLURM_NTASKS_PER_NODE")
    counts: list[str] = []
    for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [tasks] * int(times or 1)
    node = int(os.environ.get("SLURM_NODEID", "0"))
    return counts[node] if node < len(counts) else None


def first_node(nodes: str) -> str:
    """Returns the first host of a list in Slurm's notation, such as "node[03-05,9],other"."""
    found = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)  # a name may have several brackets
    return re.sub(r"\[([^-,\]]*)[^\]]*\]", r"\1", found[0] if found else nodes)
