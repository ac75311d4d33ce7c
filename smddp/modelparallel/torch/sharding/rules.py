"""The rules by which parameters are divided over replicas, gathered, and their gradients reduced.

They need numbers only. The memory estimate (footprint/estimate.py) calls them for models and
configurations that nobody runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

import torch

from smddp.modelparallel.torch.data_parallel.buckets import divided_into_buckets

__all__ = [
    "PREFETCHED",
    "count_prefetched",
    "gradient_buckets",
    "is_divisible",
    "is_large",
    "part_of",
]

_Item = TypeVar("_Item")

# So many parameters may be prefetched: gathered before code asks for them.
PREFETCHED = 2


def is_divisible(parameter: torch.Tensor) -> bool:
    """Says whether a parameter can be divided over replicas."""
    return parameter.dim() > 0 and parameter.is_floating_point()


def is_large(elements: int, threshold: int) -> bool:
    """Says whether a parameter has so many elements that it is divided if it can be."""
    return elements >= max(threshold, 1)


def part_of(elements: int, degree: int) -> int:
    """Returns the elements of each rank's part of a parameter; the last may be filled up."""
    return -(-elements // degree)


def count_prefetched(coming: Iterable[tuple[int, bool]], live: int, limit: int) -> int:
    """Returns how many of the next parameters to prefetch.

    Args:
        coming: the elements of each gathered parameter, and whether it will be live already.
        live: elements that are gathered.
        limit: most elements that may be.
    """
    count = 0
    for elements, is_live in itertools.islice(coming, PREFETCHED):
        live += elements
        if is_live or live > limit:
            break
        count += 1
    return count


def gradient_buckets(
    items: Iterable[_Item],
    kind_of: Callable[[_Item], Hashable],
    elements_of: Callable[[_Item], int],
    cap: int,
) -> list[list[_Item]]:
    """Returns the parameters of each bucket of whole gradients; all buckets of one kind together.

    Args:
        items: the divided parameters that are trained, in the order of the model.
        kind_of: returns what those of a bucket have in common.
        elements_of: returns the elements of a gathered parameter.
        cap: elements of a bucket; a larger parameter is a bucket of its own.
    """
    # Backward passes reach the last layers first.
    backwards = list(items)[::-1]
    places = {kind: place for place, kind in enumerate(dict.fromkeys(map(kind_of, backwards)))}
    backwards.sort(key=lambda item: places[kind_of(item)])
    return divided_into_buckets(backwards, kind_of, elements_of, cap)
