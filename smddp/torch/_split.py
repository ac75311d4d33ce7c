"""Checks all lists of `torch.distributed.split_group`, of which a backend sees only one.

torch hands a backend the list that names the rank, and looks at none behind it. So with a wrong
list some ranks would get a group, and others an error, or nobody to make a group with.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from typing import Any

import torch.distributed as dist

from smddp._registration import names_smddp
from smddp._torch_internals import SPLIT_GROUP

__all__ = ["check_lists_of_split_group"]


def check_lists_of_split_group() -> None:
    """Replaces `split_group`, which has no hook; groups of other backends are split as before."""
    SPLIT_GROUP.install(_checked)


def _checked(original: Any) -> Any:
    @functools.wraps(original)
    def split_group(*args: Any, **kwargs: Any) -> Any:
        with contextlib.suppress(TypeError):  # of wrong arguments; torch says so itself
            given = inspect.signature(original).bind(*args, **kwargs).arguments
            parent = given.get("parent_pg") or dist.group.WORLD
            if isinstance(parent, dist.ProcessGroup) and names_smddp(
                dist.get_backend_config(parent)
            ):
                _check(given.get("split_ranks") or [], parent.size())
        return original(*args, **kwargs)

    return split_group


def _check(lists: list[list[int]], size: int) -> None:
    """Raises ValueError unless the lists divide ranks 0 to `size` - 1, or some of them."""
    seen: set[int] = set()
    for number, members in enumerate(lists):
        which = f"list {number}, {members},"
        if not members:
            raise ValueError(
                f"smddp: split_group expects ranks in every list, but {which} is empty"
            )
        for rank in members:
            if not 0 <= rank < size:
                raise ValueError(
                    f"smddp: split_group: rank {rank} in {which} is not a rank of the group, which "
                    f"has {size}"
                )
            if rank in seen:
                raise ValueError(f"smddp: split_group: {which} names rank {rank} again")
            seen.add(rank)
