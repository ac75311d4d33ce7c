"""What `smddprun --elastic` and `smddp.elastic` agree on: a status, and how a spare takes a place.

A spare has SMDDP_ELASTIC_SPARE, its number on its host, and no rank. Everything before
`smddp.elastic.init()` in its script runs at once. There it waits until the job's store has the key
`smddp/spare/<GROUP_RANK>/<number>`: the variables that it lacks, as JSON. The supervisor of the
host writes that when one of the host's processes has died.
"""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

__all__ = ["JOB_LOST", "SPARE", "await_place", "key_of_spare"]

JOB_LOST = 75  # EX_TEMPFAIL: the status of a rank that has lost the job, and may join it again
SPARE = "SMDDP_ELASTIC_SPARE"
_PERIOD = 0.01  # seconds


def key_of_spare(host: int, number: int) -> str:
    """Returns the key of the store for which a spare waits.

    Args:
        host: its GROUP_RANK.
        number: its SMDDP_ELASTIC_SPARE.
    """
    return f"smddp/spare/{host}/{number}"


def await_place(store: Store) -> None:
    """If this process is a spare: waits until it is needed, and then sets RANK and the others.

    It waits as long as the job runs, and hears Ctrl-C; the supervisor ends it. It returns at once
    in a process that is no spare.

    Args:
        store: a client of the store at MASTER_ADDR and MASTER_PORT, without a prefix.
    """
    number = os.environ.get(SPARE)
    if number is None:
        return
    key = key_of_spare(int(os.environ["GROUP_RANK"]), int(number))
    # Not wait(), which hears no signal, and warns at each time-out.
    while not store.check([key]):
        time.sleep(_PERIOD)
    os.environ.update(json.loads(store.get(key)))
    del os.environ[SPARE]
