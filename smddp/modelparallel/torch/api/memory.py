"""`smp.memory`: what memory each rank needs, predicted and counted."""

from __future__ import annotations

import contextlib
import dataclasses
from types import TracebackType
from typing import Any

from smddp.modelparallel.core.errors import SMPUsageError
from smddp.modelparallel.torch.common.example import Example
from smddp.modelparallel.torch.footprint.census import Census, count
from smddp.modelparallel.torch.footprint.estimate import (
    FIRST,
    KINDS,
    LATER,
    UPDATE,
    Bytes,
    Choices,
    Facts,
    estimate,
)
from smddp.modelparallel.torch.footprint.facts import choices_of, facts_of, profile_of
from smddp.modelparallel.torch.job.meeting import gathered
from smddp.modelparallel.torch.job.state import state
from smddp.modelparallel.torch.model.runtime import ModelRuntime
from smddp.modelparallel.torch.optimizer.half import to_half

__all__ = ["MemoryReport", "RankMemory", "estimate_inputs", "memory"]

_MIB = 2**20


@dataclasses.dataclass
class RankMemory:
    """The memory of one rank, at the peak of each moment.

    The moments are "first step" (of the job), "step" and "optimizer.step". Each value is a
    `Bytes`, with the attributes `parameters`, `gathered`, `gradients`, `optimizer`, `buffers`,
    `activations` and `total`.

    Attributes:
        rank, partition, replica: of the job.
        predicted: by moment; empty before it is decided where modules live.
        measured: by moment; only of what has run inside `with smp.memory():`.
        now: what the rank keeps at the time of the call.
    """

    rank: int
    partition: int
    replica: int
    predicted: dict[str, Bytes]
    measured: dict[str, Bytes]
    now: Bytes

    @property
    def needed(self) -> int:
        """The predicted bytes at the highest peak; 0 if nothing is predicted."""
        return max((one.total for one in self.predicted.values()), default=0)


class MemoryReport(contextlib.AbstractContextManager["MemoryReport"]):
    """What `smp.memory` returns: a table if it is printed.

    As a context manager it counts what the code inside needs, which takes time; see `memory`.

    Attributes:
        ranks: all ranks of the job, in their order.
        notes: what is not known, and what the prediction assumes.
    """

    def __init__(self, example: Example | None) -> None:
        self._example = example
        self.ranks: list[RankMemory] = []
        self.notes: list[str] = []
        self._census: Census | None = None
        self._stack = contextlib.ExitStack()
        self._update({})

    def _update(self, measured: dict[str, Bytes]) -> None:
        runtime = _runtime("smp.memory")
        topology = state.topology
        predictions: dict[tuple[int, int], dict[str, Bytes]] = {}
        notes: list[str] = []
        if topology.rank == 0:
            try:
                predictions, notes = _predictions(runtime, self._example)
            except Exception as error:  # the other ranks wait
                notes = [f"nothing is predicted ({type(error).__name__}: {error})"]
        mine = RankMemory(
            *(topology.rank, topology.rank_in("pp"), topology.rank_in("dp")),
            *({}, measured, count(runtime.memory(), runtime.device)),
        )
        place = topology.rank_in("pp"), topology.rank_in("rdp")
        everything = (mine, place, predictions, notes)
        found = gathered("smp.memory", everything, state.groups.of("world"))
        self.ranks = [row for row, *_ in found]
        *_, predictions, self.notes = found[0]
        for row, place, *_ in found:
            row.predicted = predictions.get(place, {})

    def __enter__(self) -> MemoryReport:
        runtime = _runtime("smp.memory")
        baton = runtime.executor.baton
        if baton.watch is not None:
            raise SMPUsageError(
                "smp.memory() counts already: one `with smp.memory():` cannot be inside another"
            )

        def moment() -> str:
            if not state.in_step:
                return UPDATE
            return LATER if runtime.step.knew_counts else FIRST

        census = self._census = Census(runtime.memory, moment, runtime.device)
        baton.watch = census.watch
        self._stack.callback(setattr, baton, "watch", None)
        self._stack.enter_context(census.watch())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()
        census, self._census = self._census, None
        assert census is not None
        if error is None:  # else the other ranks may never come here
            self._update(census.peaks)

    def __str__(self) -> str:
        titles = ["rank", "part", "", *KINDS, "total"]
        lines = [titles]
        for row in self.ranks:
            head = [str(row.rank), str(row.partition)]
            for moment in (FIRST, LATER, UPDATE):
                for what, values in (("predicted", row.predicted), ("measured", row.measured)):
                    if moment in values:
                        lines.append([*head, f"{moment}, {what}", *_cells(values[moment])])
                        head = ["", ""]
            lines.append([*head, "now", *_cells(row.now)])
        widths = [max(len(line[column]) for line in lines) for column in range(len(titles))]
        table = [
            "  ".join(
                cell.ljust(width) if column == 2 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        ]
        return "\n".join(["MiB of memory at the peak of each moment", *table, *self.notes])


def _cells(values: Bytes) -> list[str]:
    unknown = values.activations is None
    cells = [
        "?" if getattr(values, kind) is None else f"{getattr(values, kind) / _MIB:.1f}"
        for kind in KINDS
    ]
    return [*cells, f"{'> ' if unknown else ''}{values.total / _MIB:.1f}"]


def memory(*args: Any, **kwargs: Any) -> MemoryReport:
    """Predicts what memory each rank needs, and counts it if asked; all ranks have to call it.

    The prediction is made from shapes: the model runs on tensors without values, forward and
    backward. With one partition it exists as soon as there is a model; with several, when the first
    step has decided where modules live. It knows activations only if it knows the shapes of the
    model's arguments: from the first step, or because they are passed here. The loss is not known;
    it counts as a cross entropy of the model's result. If the model does not run on tensors without
    values, because its control flow depends on data, the table has "?" in place of activations.
    What an optimizer keeps is predicted for those of torch and smp, and for others after their
    first step.

    The columns of a moment are what was there at its peak, so one of them alone can be larger at
    other times. The prediction assumes that `zero_grad` comes before each step. It leaves out what
    the script itself keeps, such as results of steps, and, before the first step of several
    partitions, the whole model that each rank has in memory of the host. With several partitions it
    counts as many microbatches as may be active, and with offload_activations what may have come
    back; mostly it is less. In the first steps of a sharded model it may be up to a fifth too high.
    It is too low if ranks wait long for one another, because more gradients are under way then:
    with 2 partitions, 2 shards, checkpointing and small buckets on a busy machine, by a seventh.

    As a context manager the result also counts, by memory of tensors, what the code inside needs::

        with smp.memory() as report:
            train_step(model, data, target)
            optimizer.step()
        print(report)

    That takes several times as long as the code without it. What runs outside of steps counts as
    "optimizer.step". Programs that do not do this pay
    nothing. What is no tensor does not count: torch itself, messages under way, and in the
    allocator of a GPU what is free but not given back.

    Args:
        args: positional arguments of the model for one microbatch; only shapes, dtypes and devices
            count. Until the model's first call with gradients, later calls and `smp.explain` use
            them, too; after it, those of that call.
        kwargs: its named arguments.

    Returns:
        The same report on all ranks.

    Raises:
        SMPInitializationError: `smp.init` has not been called.
        SMPPeerError: a rank has not called it within the timeout of the process group.
        SMPUsageError: there is no smp.DistributedModel, or a step runs.
    """
    runtime = _runtime("smp.memory")
    example = None
    if args or kwargs:
        half = runtime.half
        if half is not None:
            args, kwargs = to_half(args, half), to_half(kwargs, half)
        example = Example.of(args, kwargs)
        runtime.announced = example
    return MemoryReport(example)


def _runtime(call: str) -> ModelRuntime:
    _ = state.cfg
    model = state.current_model()
    if model is None:
        raise SMPUsageError(f"create smp.DistributedModel before {call}")
    if state.in_step:
        raise SMPUsageError(f"{call} cannot be called inside a step")
    runtime: ModelRuntime = model.runtime
    return runtime


def estimate_inputs(
    runtime: ModelRuntime, example: Example | None = None
) -> tuple[Facts, Choices, list[str]]:
    """Returns what predictions are made of, and notes about what is not known.

    Args:
        runtime: of the model, which has been divided.
        example: of the model's arguments; None for those of its first call, or before it for those
            that `smp.memory` has been given.
    """
    example = example or runtime.example or runtime.announced
    profile, notes = None, []
    if example is None:
        notes = [
            "activations are not predicted: the shapes of the model's arguments are not known "
            "before the first step; pass those of a microbatch to smp.memory"
        ]
    else:
        profile, note = profile_of(runtime, example)
        notes = [note] if note else []
    if runtime.model.routing.recomputes and not runtime.checkpoints.any:
        notes.append("calls by patches.checkpoint count as if they kept their activations")
    facts, more = facts_of(state, runtime, profile)
    return facts, choices_of(state, runtime), [*notes, *more]


def _predictions(
    runtime: ModelRuntime, example: Example | None
) -> tuple[dict[tuple[int, int], dict[str, Bytes]], list[str]]:
    """Returns the predictions for each rank, by its places in the pipeline and its rdp group."""
    if not runtime.divided:
        return {}, ["nothing is predicted before the first step has divided the model"]
    facts, choices, notes = estimate_inputs(runtime, example)
    found = {}
    for part in range(choices.partitions):
        once = estimate(facts, choices, part, 0)
        for replica in range(choices.copies):
            again = choices.shard_optimizer_state and replica > 0
            found[part, replica] = estimate(facts, choices, part, replica) if again else once
    return found, notes
