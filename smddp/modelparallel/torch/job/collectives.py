"""Collective calls of the tasks of a step, which a failed step does not leave incomplete.

If a task of one rank fails, the others may wait in a collective call that this rank does not make
any more. So each rank notes its calls. When a step fails, the ranks tell each other their notes,
and a rank that has made fewer calls than another makes the missing ones, with zeros. Then nobody
waits, and the process group is as before the step. Those that have waited raise.

Two ranks may make the same calls for different modules, if these have one size. Results are wrong
then, and nothing waits. So each rank also makes a checksum of its calls with the names of the
modules, and the ranks compare these at the end of the step.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from smddp.modelparallel.core.errors import SMPPeerError
from smddp.modelparallel.core.failure import MODULES_NAMED

__all__ = ["Call", "Collectives"]


class Call(NamedTuple):
    """A call that a rank has begun. It is sent as a plain tuple.

    Attributes:
        kind: which one.
        result, argument: shapes.
        dtype, device: of both.
    """

    kind: str
    result: tuple[int, ...]
    argument: tuple[int, ...]
    dtype: torch.dtype
    device: str


# In each of them every rank needs something of every other one. So a rank that has ended a call
# knows that all of them have begun it.
_KINDS: dict[str, Callable[..., Any]] = {
    "all_gather": dist.all_gather_into_tensor,
    "all_to_all": dist.all_to_all_single,
    "reduce_scatter": dist.reduce_scatter_tensor,
    "sum": lambda result, _, **how: dist.all_reduce(result, **how),
    "maximum": lambda result, _, **how: dist.all_reduce(result, dist.ReduceOp.MAX, **how),
}


class Collectives:
    """Makes collective calls in a process group; all ranks of it make the same ones in one order.

    Outside a step nothing is noted, and a call that other ranks do not make waits until the timeout
    of the group. Any thread may call the methods.

    Attributes:
        group: in which nothing else is sent.
        ranks: its members, as ranks of the job.
        trail: the modules that were entered last.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.ranks = dist.get_process_group_ranks(group)
        # Held for a look at `_stopped` and the note: a call that is noted is made.
        self._lock = threading.Lock()
        self._noting = self._stopped = False
        self._calls: list[Call] = []
        self._orders = [0]  # `order_after`, by number of calls
        self._module = ""
        self.trail: tuple[str, ...] = ()

    @property
    def begun(self) -> int:
        """How many calls have begun in the step."""
        return len(self._orders) - 1

    def order_after(self, count: int) -> int:
        """Returns a checksum of the first calls of the step: kinds, modules and their order.

        Args:
            count: of how many calls.
        """
        return self._orders[count]

    def enter(self, module: str) -> None:
        """Notes which module makes the calls that follow.

        Args:
            module: its name, the same on all ranks.
        """
        self._module = module
        self.trail = (*self.trail, module)[-MODULES_NAMED:]

    def make(self, kind: str, result: Tensor, argument: Tensor) -> None:
        """Makes a call, and waits for its end as `torch.distributed` does.

        Args:
            kind: "all_gather", "all_to_all" and "reduce_scatter" are the functions of
                `torch.distributed` on one tensor; "sum" and "maximum" change `result` in place.
            result: contiguous.
            argument: contiguous; for the last two kinds, `result` again.

        Raises:
            SMPPeerError: the step has failed, on this rank or another.
        """
        shapes = tuple(result.shape), tuple(argument.shape)
        with self._lock:
            self._raise_if_stopped()
            if self._noting:
                self._calls.append(Call(kind, *shapes, result.dtype, result.device.type))
                text = f"{kind} {self._module};".encode()
                self._orders.append(zlib.crc32(text, self._orders[-1]))
        _KINDS[kind](result, argument, group=self.group)
        self._raise_if_stopped()  # what has come may be zeros of a rank that has failed

    def _raise_if_stopped(self) -> None:
        if self._stopped:
            raise SMPPeerError("the step has failed on another rank of the tensor-parallel group")

    # --- a step; the executor calls these ---------------------------------------------------------

    def begin_step(self) -> None:
        """Begins to note the calls of a step."""
        with self._lock:
            self._calls, self._orders, self._module = [], [0], ""
            self.trail = ()
            self._noting, self._stopped = True, False

    def stop(self) -> list[Call]:
        """Lets no call begin in this step any more; returns those that have begun."""
        with self._lock:
            self._stopped = True
            return self._calls

    def settle(self) -> None:
        """Waits for the calls that this rank has made: on a GPU they go on when `make` returns."""
        if any(call.device != "cpu" for call in self._calls[-1:]):
            torch.accelerator.current_stream().synchronize()

    def complete(self, others: Iterable[Sequence[Sequence[Any]]]) -> list[Any]:
        """Begins the calls that other ranks have begun in this step, and this one has not.

        Args:
            others: what `stop` has returned on other ranks of the group.

        Returns:
            What to wait for, with the memory that is used until then.
        """
        longest = max(others, key=len, default=())
        with self._lock:
            missing = [Call(*one) for one in longest[len(self._calls) :]]
            self._calls += missing
            return [self._begin(call) for call in missing]

    def _begin(self, call: Call) -> Any:
        result, argument = (
            torch.zeros(shape, dtype=call.dtype, device=call.device)
            for shape in (call.result, call.argument)
        )
        work = _KINDS[call.kind](result, argument, group=self.group, async_op=True)
        return work, result, argument

    def end_step(self) -> None:
        """Ends the notes: what follows is outside any step."""
        with self._lock:
            self._calls = []
            self._noting = self._stopped = False
