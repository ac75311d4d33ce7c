"""What the replicas of a model tell each other about a step, besides its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from smddp.modelparallel.core.errors import SMPPeerError, SMPUsageError
from smddp.modelparallel.core.failure import Elsewhere, summary
from smddp.modelparallel.torch.pipeline.modules import difference

__all__ = ["abstain", "agree", "tell_replicas"]

_Decision = TypeVar("_Decision")


def tell_replicas(group: dist.ProcessGroup, failure: str, note: Any = None) -> dict[int, Any]:
    """Exchanges how the step goes; every replica has to call it.

    Args:
        group: of the replicas.
        failure: why the step has failed on this one, in one line; empty if it has not.
        note: anything else to exchange that pickles.

    Returns:
        The notes, by rank in the job.

    Raises:
        SMPPeerError: the step has not failed here, but elsewhere.
    """
    said: list[Any] = [None] * group.size()
    dist.all_gather_object(said, (failure, note), group=group)
    by_rank = dict(zip(dist.get_process_group_ranks(group), said, strict=True))
    for rank, (text, _) in by_rank.items():
        if text and not failure:
            raise Elsewhere(rank, text, redo=False).error()
    return {rank: value for rank, (_, value) in by_rank.items()}


def agree(group: dist.ProcessGroup, modules: list[str], make: Callable[[], _Decision]) -> _Decision:
    """Returns the first replica's decision on all replicas; only that one makes it.

    As long as there is no decision, rank 0 of each pipeline makes exactly one of two calls per
    step: this one in its first call of the model, or `abstain` at the end of the step. So no
    replica waits for another whose step has failed, and either all replicas have the decision or
    none.

    Args:
        group: of the replicas.
        modules: the names of the model's modules.
        make: makes the decision, which has to pickle.

    Raises:
        SMPPeerError: the step failed on another replica.
        SMPUsageError: another replica has another model.
    """
    box: list[_Decision | None] = [None]
    several = group.size() > 1
    if group.rank() == 0:
        try:
            box[0] = make()
        except BaseException as error:
            if several:
                _meet(group, summary(error), modules)
            raise
    if several:
        _meet(group, "", modules)
        dist.broadcast_object_list(box, dist.get_global_rank(group, 0), group=group)
    assert box[0] is not None
    return box[0]


def abstain(group: dist.ProcessGroup, failure: str) -> None:
    """Tells the other replicas that this one has ended its step without `agree`.

    Args:
        group: of the replicas.
        failure: why the step has failed here; empty if it has not.

    Raises:
        SMPPeerError: it has not failed here, and other replicas have called the model.
    """
    _meet(group, failure, None)


def _meet(group: dist.ProcessGroup, failure: str, modules: list[str] | None) -> None:
    """Exchanges whether the step has failed, and whether it has called the model.

    Raises unless the step goes on, on all replicas, and has called the same model on all or none.

    Args:
        group: of the replicas.
        failure: why the step has failed here; empty if it has not.
        modules: the names of the modules of the model that was called; None if none was.
    """
    said = tell_replicas(group, failure, modules)
    if failure:
        return
    called = [rank for rank, names in said.items() if names is not None]
    for rank in called:
        if said[rank] != said[called[0]]:
            who, other = f"rank {called[0]}", f"rank {rank}"
            raise SMPUsageError(
                f"the models of {who} and {other} of the job differ: "
                f"{difference(said[called[0]], said[rank], who, other)}. All ranks have to create "
                "the same model"
            )
    if 0 < len(called) < len(said):
        with_call = called[0]
        without = next(rank for rank, names in said.items() if names is None)
        raise SMPPeerError(
            f"the step has called the model on rank {with_call} of the job, and not on rank "
            f"{without}: all replicas have to make the first call of the model in the same step"
        )
