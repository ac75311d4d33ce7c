"""Finds the NUMA nodes on which ranks may run, which is where their shared memory lies."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path

__all__ = ["describe", "nodes_of"]

_NODES = Path("/sys/devices/system/node")


def _parse_list(text: str) -> set[int]:
    """Returns the numbers of a list in the kernel's notation, such as "0-3,8"."""
    numbers: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers


def nodes_of(cores: Collection[int] | None = None, folder: Path = _NODES) -> list[int]:
    """Returns the NUMA nodes of some cores.

    Args:
        cores: numbers of cores; None means those that this process may run on.
        folder: the kernel's folder about NUMA nodes.

    Returns:
        Numbers of nodes in ascending order; empty if the kernel does not tell.
    """
    cores = os.sched_getaffinity(0) if cores is None else cores
    found = []
    for node in folder.glob("node[0-9]*"):
        try:
            if _parse_list((node / "cpulist").read_text()) & set(cores):
                found.append(int(node.name.removeprefix("node")))
        except OSError:
            continue  # the node was removed, or a sandbox hides the file
    return sorted(found)


def describe(nodes_of_ranks: Sequence[Sequence[int]]) -> str:
    """Returns a sentence that names the NUMA nodes of the ranks; empty if all are on one node.

    Args:
        nodes_of_ranks: for each rank what nodes_of() returned there.
    """
    if len({node for nodes in nodes_of_ranks for node in nodes}) < 2:
        return ""
    ranks: dict[str, list[int]] = {}
    for rank, nodes in enumerate(nodes_of_ranks):
        ranks.setdefault(",".join(map(str, nodes)) or "?", []).append(rank)
    places = "; ".join(
        f"node{'s' if ',' in where else ''} {where}: {','.join(map(str, who))}"
        for where, who in ranks.items()
    )
    unbound = any(len(nodes) > 1 for nodes in nodes_of_ranks)
    advice = (
        " (bind each rank to one: numactl --cpunodebind, mpirun --bind-to numa)" if unbound else ""
    )
    return f"NUMA: ranks by where they may run, {places}{advice}"
