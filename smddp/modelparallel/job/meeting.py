"""Where all ranks of a group have to come: says whom it waits for, while it waits.

A rank that calls something alone would only learn of it when the timeout of its process group is
over, which may be half an hour. Nobody can know that the others will not come: they may be late.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d

from smddp.modelparallel.common.errors import SMPPeerError

__all__ = ["together"]

log = logging.getLogger("smddp.modelparallel")

# After so long it says something; the call itself waits for as long as its group allows.
_PATIENCE = timedelta(seconds=10)
# Of the meetings of this process: the same on all ranks, as long as all come.
_numbers = itertools.count()


@contextlib.contextmanager
def together(what: str, group: dist.ProcessGroup) -> Iterator[None]:
    """Surrounds the collectives of a call that all ranks of a pipeline have to make.

    Args:
        what: they have to call; for the texts.
        group: who has to come.

    Raises:
        SMPPeerError: one has not, within the timeout of the process group.
    """
    _meet(what, group)
    try:
        yield
    except RuntimeError as error:
        raise SMPPeerError(
            f"{what}: not all ranks of the pipeline answered; all of them have to call it, at the "
            f"same point of the script ({error})"
        ) from error


def _meet(what: str, group: dist.ProcessGroup) -> None:
    """Waits a little for the other ranks, and warns if some have not come."""
    store = distributed_c10d._get_process_group_store(group)
    me, size = group.rank(), group.size()
    number = next(_numbers)
    keys = [f"smp/meeting{number}/{rank}" for rank in range(size)]
    store.set(keys[me], "")
    try:
        store.wait(keys, _PATIENCE)
    except RuntimeError:
        late = [rank for rank in range(size) if not store.check([keys[rank]])]
        if late:
            log.warning(
                "smp: %s on rank %d waits for rank %s of the pipeline. All of them have to call "
                "it, at the same point of the script",
                *(what, me, ", ".join(map(str, late))),
            )
