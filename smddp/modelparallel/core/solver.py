"""Divides a sequence of costs into contiguous parts: exactly, and as in the SMP paper.

The functions work on numbers only. Both methods try to make `bottleneck` small. The paper is
Karakus et al., "Amazon SageMaker Model Parallelism", 2021.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

__all__ = ["Node", "bottleneck", "divide_exactly", "divide_tree", "loads"]


def loads(costs: Sequence[float], cuts: Sequence[float], starts: Sequence[int]) -> list[float]:
    """Returns the load of each part: the sum of its costs and of the cuts at its two ends.

    Args:
        costs: of the items, in order.
        cuts: cuts[i] is the cost of a border before item i.
        starts: the first item of each part; starts[0] is 0.
    """
    ends = [*starts[1:], len(costs)]
    result = []
    for begin, end in zip(starts, ends, strict=True):
        load = sum(costs[begin:end])
        load += cuts[begin] if begin > 0 else 0.0
        load += cuts[end] if end < len(costs) else 0.0
        result.append(load)
    return result


def bottleneck(costs: Sequence[float], cuts: Sequence[float], starts: Sequence[int]) -> float:
    """Returns the largest load; it limits how often a pipeline finishes a microbatch.

    The arguments are those of `loads`.
    """
    return max(loads(costs, cuts, starts))


def divide_exactly(costs: Sequence[float], cuts: Sequence[float], parts: int) -> list[int]:
    """Returns the first item of each part, for a division with the smallest bottleneck.

    If several divisions have the smallest bottleneck, it prefers small cuts. The method is dynamic
    programming over (parts, end).

    Args:
        costs: of the items, in order.
        cuts: as for `loads`.
        parts: how many; fewer are made if there are fewer items.
    """
    count = len(costs)
    parts = min(parts, count)
    total = np.concatenate([[0.0], np.cumsum(costs)])
    price = np.concatenate([np.asarray(cuts, dtype=float), [0.0]])
    price[0] = 0.0
    # best[end]: the smallest bottleneck of the items before `end` in the parts so far; paid[end]:
    # the sum of its cuts, which decides between equal ones.
    best = np.where(np.arange(count + 1) > 0, total + price, np.inf)
    paid = price.copy()
    choices: list[np.ndarray] = []
    for part in range(2, parts + 1):
        new_best = np.full(count + 1, np.inf)
        new_paid = np.full(count + 1, np.inf)
        choice = np.zeros(count + 1, dtype=int)
        for end in range(part, count + 1):
            begins = np.arange(part - 1, end)
            load = total[end] - total[begins] + price[begins] + price[end]
            worst = np.maximum(best[begins], load)
            least = worst.min()
            candidates = np.flatnonzero(worst <= least * (1 + 1e-12))
            pick = candidates[np.argmin(paid[begins[candidates]])]
            choice[end] = begins[pick]
            new_best[end] = worst[pick]
            new_paid[end] = paid[begins[pick]] + price[end]
        choices.append(choice)
        best, paid = new_best, new_paid
    starts = []
    end = count
    for choice in reversed(choices):
        end = int(choice[end])
        starts.append(end)
    return [0, *reversed(starts)]


@dataclasses.dataclass
class Node:
    """A node of the module tree.

    Attributes:
        number: of the module, by which `divide_tree` names it.
        own: its cost, without that of its children.
        children: in the order of their first calls.
    """

    number: int
    own: float
    children: list[Node] = dataclasses.field(default_factory=list)

    @property
    def cost(self) -> float:
        """The cost of the node and all below it."""
        return self.own + sum(child.cost for child in self.children)


def divide_tree(root: Node, parts: int) -> dict[int, int]:
    """Returns the part of each node, by the method of the SMP paper.

    Each node has a set of devices, and the root has all. The children of a node are divided into
    segments of about equal cost. The devices are distributed over the segments by the method of
    highest averages (d'Hondt). A segment with one child and several devices is divided further in
    the same way; the children of any other segment get one of its devices each. A node lives on the
    first of its devices.

    Args:
        root: of the module tree.
        parts: number of devices.

    Returns:
        The device of each node, by its number.
    """
    result: dict[int, int] = {}
    queue = [(root, list(range(parts)))]
    while queue:
        node, devices = queue.pop(0)
        result[node.number] = devices[0]
        if not node.children:
            continue
        costs = [child.cost for child in node.children]
        starts = divide_exactly(costs, [0.0] * len(costs), len(devices))
        segments = [
            node.children[begin:end]
            for begin, end in zip(starts, [*starts[1:], len(costs)], strict=True)
        ]
        shares = _highest_averages(
            [sum(child.cost for child in segment) for segment in segments], len(devices)
        )
        rest = list(devices)
        for segment, share in zip(segments, shares, strict=True):
            mine, rest = rest[:share], rest[share:]
            if len(segment) == 1 and share > 1:
                queue.append((segment[0], mine))
                continue
            # Several children share the devices of their segment, one after the other.
            own = mine or [devices[0]]
            inner = divide_exactly(
                [child.cost for child in segment], [0.0] * len(segment), len(own)
            )
            for position, child in enumerate(segment):
                device = own[sum(start <= position for start in inner) - 1]
                queue.append((child, [device]))
    return result


def _highest_averages(costs: Sequence[float], seats: int) -> list[int]:
    shares = [0] * len(costs)
    for _ in range(seats):
        averages = [cost / (share + 1) for cost, share in zip(costs, shares, strict=True)]
        shares[int(np.argmax(averages))] += 1
    return shares
