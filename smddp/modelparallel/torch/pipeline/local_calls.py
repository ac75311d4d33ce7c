"""Runs calls of modules that live on this rank, for code of this rank and for others."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch

from smddp._torch_internals import MODULE_CALLS
from smddp.modelparallel.core.baton import Current
from smddp.modelparallel.core.order import SliceObserver
from smddp.modelparallel.torch.activations.offload import Offloader
from smddp.modelparallel.torch.activations.region import Keeper, Region, layer_arguments, runs_again
from smddp.modelparallel.torch.pipeline.changes import Changes
from smddp.modelparallel.torch.pipeline.frame import Frame
from smddp.modelparallel.torch.pipeline.hooks import ForwardHooks
from smddp.modelparallel.torch.pipeline.method import HOOKED, READS, Method, Use
from smddp.modelparallel.torch.pipeline.modules import Modules
from smddp.modelparallel.torch.pipeline.objects import Record
from smddp.modelparallel.torch.pipeline.outlook import Outlook, key_of
from smddp.modelparallel.torch.pipeline.randomness import seed_all, seeded
from smddp.modelparallel.torch.pipeline.reads import OwnValues
from smddp.modelparallel.torch.pipeline.step import Schedule

__all__ = ["LocalCalls", "Seed", "Surroundings"]

# For the random numbers of a call; None if it draws none. Of several layers: one for each.
Seed = int | tuple[int | None, ...] | None

_NOTHING = contextlib.nullcontext()


class Surroundings(Protocol):
    """What else happens around tasks and around the modules that run on this rank."""

    def around_task(self) -> contextlib.AbstractContextManager[Any]:
        """Returns a context for the code of a task."""

    def around_module(self, number: int) -> contextlib.AbstractContextManager[Any]:
        """Returns a context for a call of the module with this number."""


class LocalCalls:
    """The calls that run on this rank.

    Attributes:
        out_of_order: numbers of the modules here that have been called in this step after a later
            part of the program had called them: another microbatch, or another call graph. Only
            of modules with buffers, and keepers.
        surroundings: entered around tasks and modules; None for nothing.
        observer: is told which slices run; None for nobody.
        offloader: keeps the arguments of calls with activation checkpointing; None for autograd.
    """

    def __init__(
        self,
        current: Current,
        modules: Modules,
        changes: Changes,
        hooks: ForwardHooks,
        values: OwnValues,
        entered: Callable[[str], None] | None,
    ) -> None:
        """Begins without a step.

        Args:
            current: the task of each thread.
            modules: of the model.
            changes: what code changes.
            hooks: the forward hooks of the modules.
            values: those that other ranks read.
            entered: is told of the calls that come from other ranks: name of the module. None for
                nobody.
        """
        self._current, self._modules = current, modules
        self._changes, self._hooks, self._values = changes, hooks, values
        self._entered = entered
        self.out_of_order: set[int] = set()
        self.surroundings: Surroundings | None = None
        self.observer: SliceObserver | None = None
        self.offloader: Offloader | None = None
        self._outlook: Outlook | None = None
        # Where tasks make tensors if they do not say where; that of the script.
        self._default_device = torch.device("cpu")
        # By number of a module here that has buffers: which task has called it last.
        self._called_last: dict[int, tuple[int, tuple[int, ...]]] = {}
        # The modules that have activation checkpointing here, by number: do both runs draw the same
        # random numbers?
        self._recomputed: dict[int, bool] = {}
        # By number of the module, and the first and last layer: see `Region`.
        self._regions: dict[tuple[int, int, int], Region] = {}

    # --- what else happens ------------------------------------------------------------------------

    def surround(self, surroundings: Surroundings, observer: SliceObserver | None) -> None:
        """Lets something happen around all tasks and modules.

        Args:
            surroundings: are entered there.
            observer: is told which slices run, if there is an order group; None for nobody.
        """
        self.surroundings, self.observer = surroundings, observer

    def recompute(self, numbers: Mapping[int, bool]) -> None:
        """Gives modules activation checkpointing, and takes it from all others.

        Args:
            numbers: of the modules: do both runs draw the same random numbers?
        """
        self._recomputed = dict(numbers)

    def offload(
        self, horizon: int, alone: bool, owned: Callable[[], Iterable[torch.Tensor]]
    ) -> None:
        """Moves the arguments of calls with activation checkpointing out of memory from now on.

        Args:
            horizon: how many tasks ahead arguments come back.
            alone: is there one partition?
            owned: see `Offloader`.
        """
        if alone:
            # Without other tasks in between: the calls that were made last are needed first.
            self.offloader = Offloader(lambda keys: keys[: -horizon - 1 : -1], owned)
        else:
            self._outlook = Outlook(horizon)
            self.offloader = Offloader(self._outlook.soonest, owned)

    # --- the life of a step -----------------------------------------------------------------------

    def begin_step(self, schedule: Schedule) -> None:
        """Begins a step, on the thread of its caller."""
        self._default_device = torch.get_default_device()
        self.out_of_order.clear()
        self._called_last.clear()
        if self.offloader is not None:
            self.offloader.begin_step()
        if self._outlook is not None:
            self._outlook.begin_step(schedule)

    def goes_on(self, frame: Frame, forward: bool) -> None:
        """Moves what is offloaded, when a task begins or goes on."""
        if self._outlook is not None and self.offloader is not None:
            self._outlook.enter(frame, forward)
            self.offloader.balance()

    def around_task(self) -> contextlib.AbstractContextManager[Any]:
        """Returns a context in which the code of a task runs."""
        if self.surroundings is None and self._default_device.type == "cpu":
            return _NOTHING
        return self._around_task()

    @contextlib.contextmanager
    def _around_task(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            # `torch.set_default_device` holds for one thread, and slows torch down on it.
            if self._default_device.type != "cpu":
                stack.enter_context(self._default_device)
            if self.surroundings is not None:
                stack.enter_context(self.surroundings.around_task())
            yield

    # --- calls ------------------------------------------------------------------------------------

    def serve(self, number: int, method: Method, seed: Seed, args: Any, kwargs: Any) -> Any:
        """Runs a call that another rank has sent.

        Args:
            number: of the module, which lives here.
            method: what the call does.
            seed: for the random numbers of the call; None if it draws none; of several layers, one
                for each.
            args: positional arguments.
            kwargs: named arguments.

        Returns:
            What the module returns; for a read, the values, or None if there is no tensor.
        """
        use = method.use
        if use in READS:
            value = functools.partial(self._values.value, number, method)
            return value() if self.surroundings is None else self._surrounded(number, value)
        if self._entered is not None:
            self._entered(self._modules.names[number])
        if use is Use.LAYERS:
            return self.run_layers(number, seed, *args)
        # The random state is not restored afterwards: the task has none of its own, and
        # `Baton.wait` saves that of a task that waits.
        if isinstance(seed, int):
            seed_all(seed)
        return self.run(number, use, args, kwargs)

    def run(self, number: int, use: Use, args: Any, kwargs: Any) -> Any:
        """Runs a module.

        Args:
            number: of the module.
            use: CALL, FORWARD or RECOMPUTED.
            args: positional arguments.
            kwargs: named arguments.

        Returns:
            What the module returns.
        """
        module = self._modules.by_number[number]
        task = self._current.task
        frame: Frame | None = None if task is None else task.frame
        if frame is not None and (module._buffers or number in self._changes.keepers):
            self._note_call(number, frame)
        preserve = self._recomputed.get(number) if use is Use.CALL else None
        function = functools.partial(MODULE_CALLS.original, module)
        recorder = None if frame is None else frame.recorder
        if recorder is not None and not (recorder.wants(number) and use in HOOKED):
            recorder = None
        if recorder is not None and recorder.runs_later(number, self._modules.rank):
            function = functools.partial(self._hooks.call_without, module, number)
        if use is Use.RECOMPUTED:
            (args, kwargs), preserve = args
        elif use is Use.FORWARD:
            function = functools.partial(type(module).forward, module)
        if self.surroundings is not None:
            # Both runs of a module with activation checkpointing have the same surroundings.
            function = functools.partial(self._surrounded, number, function)
        if preserve is None:
            result = function(*args, **kwargs)
        else:
            region = self._region(number)
            result = region.call(function, args, kwargs, preserve, self._keeper())
        if recorder is not None:
            recorder.add(number, Record(str(number), self._modules.rank, args, kwargs, result))
        return result

    def run_layers(
        self,
        number: int,
        seeds: Any,
        value: Any,
        begin: int,
        end: int,
        spread: bool,
        preserve: bool,
    ) -> Any:
        """Does `Routing.call_layers` on this rank.

        Args:
            number: of the nn.Sequential.
            seeds: of the layers; None outside a step.
            value: the argument of the first layer.
            begin: the first layer.
            end: the one after the last layer.
            spread: see `layer_arguments`.
            preserve: draw the same random numbers in both runs.

        Returns:
            What the last layer returns.
        """
        by_number = self._modules.by_number
        numbers = self._modules.layers(number)[begin:end]

        def run(value: Any) -> Any:
            for one, seed in zip(numbers, seeds or [None] * len(numbers), strict=True):
                args = layer_arguments(by_number[one], value, spread)
                with seeded(seed) if seed is not None else _NOTHING:
                    value = self.run(one, Use.CALL, args, {})
            return value

        region = self._regions.get((number, begin, end))
        if region is None:
            name = f"layers {begin} to {end - 1} of {self._modules.names[number]!r}"
            region = Region(name, [by_number[one] for one in numbers])
            self._regions[number, begin, end] = region
        return region.call(run, (value,), {}, preserve, self._keeper())

    def _note_call(self, number: int, frame: Frame) -> None:
        """Notes a call of a module here, which may change its buffers, or what it keeps."""
        if runs_again():
            return
        now = frame.microbatch, frame.path
        last = self._called_last.setdefault(number, now)
        if now != last:
            (microbatch, path), (earlier, before) = now, last
            # A call within another one may come before or after calls of that itself.
            length = min(len(path), len(before))
            if (microbatch, path[:length]) < (earlier, before[:length]):
                self.out_of_order.add(number)
            self._called_last[number] = now

    def _region(self, number: int) -> Region:
        region = self._regions.get((number, 0, 0))
        if region is None:
            name = f"module {self._modules.names[number]!r}"
            region = self._regions[number, 0, 0] = Region(name, [self._modules.by_number[number]])
        return region

    def _surrounded(
        self, number: int, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Calls a function of a module, whose arguments may have any names."""
        assert self.surroundings is not None
        with self.surroundings.around_module(number):
            return function(*args, **kwargs)

    def _keeper(self) -> Keeper | None:
        """Returns what keeps the arguments of a call that runs here now."""
        if self.offloader is None:
            return None
        if self._outlook is None:
            return functools.partial(self.offloader.keep, None)
        task = self._current.task
        if task is None or task.frame is None:
            return None
        return functools.partial(self.offloader.keep, key_of(task.frame))
