"""How many ranks each node has, of those that one machine plays."""

from __future__ import annotations

import re

__all__ = [
    "ranks_of_nodes",
    "sizes_of_nodes",
]

_MOST_RANKS = 1 << 20


def sizes_of_nodes(text: str) -> list[int]:
    """Returns the number of ranks of each node: "2x3" gives [3, 3], "3+1" gives [3, 1].

    An empty list if the text is not of this form, or has a node without ranks, or more ranks than
    any job has.
    """
    if found := re.fullmatch(r"(\d{1,7})x(\d{1,7})", text):
        if int(found[1]) * int(found[2]) > _MOST_RANKS:
            return []
        sizes = [int(found[2])] * int(found[1])
    elif re.fullmatch(r"\d{1,7}(\+\d{1,7})*", text):
        sizes = [int(size) for size in text.split("+")]
    else:
        sizes = []
    return [] if 0 in sizes or sum(sizes) > _MOST_RANKS else sizes


def ranks_of_nodes(ranks: int | None, nodes: str | None) -> list[int]:
    """Returns the number of ranks of each node that this machine plays.

    Args:
        ranks: of -n.
        nodes: of --nodes: a number of nodes with as many ranks each, or "2x3", or "3+1".

    Raises:
        ValueError: one of them is invalid, or they contradict each other.
    """
    if ranks is not None and ranks < 1:
        raise ValueError(f"-n {ranks}: expects a number of ranks of at least 1")
    layout = [ranks or 1]
    if nodes is not None and nodes.isdigit() and int(nodes) > 0 and ranks:
        each, rest = divmod(ranks, int(nodes))
        if rest:
            raise ValueError(
                f"{ranks} ranks cannot be divided evenly over {nodes} nodes: give the ranks of "
                "each, such as --nodes 3+1"
            )
        layout = [each] * int(nodes)
    elif nodes is not None:
        layout = [] if nodes.isdigit() or re.search(r"(?<!\d)0", nodes) else sizes_of_nodes(nodes)
        if not layout:
            raise ValueError(
                f"--nodes {nodes}: expects a number of nodes together with -n, or the ranks of "
                "each node, such as 2x2 or 3+1"
            )
    if ranks is not None and sum(layout) != ranks:
        raise ValueError(f"-n {ranks}, but --nodes {nodes} has {sum(layout)} ranks")
    return layout
