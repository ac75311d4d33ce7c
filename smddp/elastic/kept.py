"""What a job keeps: what a newcomer gets, what a lost step restores, and a file of it."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import pickle
import random
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from smddp._torch_internals import (
    push_parameters_of_reducer,
    rebuild_buckets_of_reducer,
    reset_reducer,
    states_of_scaler,
    update_group_of_ddp,
)
from smddp.elastic.sampler import Sampler

__all__ = ["Kept"]


class _Pickler(pickle.Pickler):
    """Leaves tensors out; they are sent apart."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[torch.Tensor] = []

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return None
        self.tensors.append(value.detach().contiguous())
        return value.dtype, tuple(value.shape)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[torch.Tensor] = []

    def persistent_load(self, what: Any) -> torch.Tensor:
        dtype, shape = what
        self.tensors.append(torch.empty(shape, dtype=dtype))
        return self.tensors[-1]


class Kept:
    """The objects that a script passes to `job.keep()`, in its order, the same on all ranks.

    Raises:
        TypeError: something has no state.
        ValueError: something cannot go on with other members.
    """

    def __init__(self, things: tuple[Any, ...]) -> None:
        self.modules = [each for each in things if isinstance(each, nn.Module)]
        self.models = [each for each in self.modules if isinstance(each, DistributedDataParallel)]
        self.optimizers = [each for each in things if isinstance(each, torch.optim.Optimizer)]
        self.samplers = [each for each in things if isinstance(each, Sampler)]
        self.generators = [each for each in things if isinstance(each, torch.Generator)]
        known = (*self.modules, *self.optimizers, *self.generators)
        self.others = [each for each in things if not any(each is one for one in known)]
        for each in self.others:
            if not hasattr(each, "state_dict") or not hasattr(each, "load_state_dict"):
                raise TypeError(
                    "job.keep() takes modules, optimizers, torch.Generators, and what has "
                    f"state_dict() and load_state_dict(), but got {type(each).__name__}"
                )
        if len(self.samplers) > 1:
            raise ValueError("job.keep(): one Sampler, whose shares weight the gradients")
        _refuse(self.modules)
        # Where the buffers are, since modules may replace them.
        self._owners = [
            (module, name)
            for each in self.modules
            for module in each.modules()
            for name in module._buffers
        ]
        self._saved: dict[str, Any] = {}
        self._weights: list[Any] = []

    # --- a step that is done again ----------------------------------------------------------------

    def save(self) -> None:
        """Notes what a step may change before it is committed."""
        buffers = [(module, name, module._buffers[name]) for module, name in self._owners]
        numpy = sys.modules.get("numpy")
        self._saved = {
            "buffers": [
                (*place, value, None if value is None else value.detach().clone())
                for *place, value in buffers
            ],
            "groups": [
                [_settings(group) for group in each.param_groups] for each in self.optimizers
            ],
            "others": [copy.deepcopy(each.state_dict()) for each in self.others],
            "torch": torch.get_rng_state(),
            "generators": [each.get_state() for each in self.generators],
            "python": random.getstate(),
            "numpy": None if numpy is None else numpy.random.get_state(),
        }

    def restore(self) -> None:
        """Makes everything as it was when save() was called. Gradients are forgotten."""
        saved = self._saved
        with torch.no_grad():
            for module, name, value, copied in saved["buffers"]:
                module._buffers[name] = value
                if value is not None:
                    value.copy_(copied)
        for optimizer, groups in zip(self.optimizers, saved["groups"], strict=True):
            for group, settings in zip(optimizer.param_groups, groups, strict=True):
                group.update(_settings(settings))
        self.load_others(saved["others"])
        torch.set_rng_state(saved["torch"])
        for generator, state in zip(self.generators, saved["generators"], strict=True):
            generator.set_state(state)
        random.setstate(saved["python"])
        if saved["numpy"] is not None:
            sys.modules["numpy"].random.set_state(saved["numpy"])
        self.forget_gradients()

    def load_others(self, states: list[Any]) -> None:
        """Loads states of schedulers and the like."""
        for each, state in zip(self.others, states, strict=True):
            if isinstance(each, torch.amp.GradScaler):
                states_of_scaler(each).clear()  # what unscale_() has noted in the step
            each.load_state_dict(state)

    def forget_gradients(self) -> None:
        """They belong to a step that is over, or lost."""
        for module in self.modules:
            module.zero_grad(set_to_none=True)
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    # --- other members ----------------------------------------------------------------------------

    def broadcast(self, source: int, loads: bool) -> None:
        """Sends everything from one rank to all.

        Args:
            source: the rank that sends.
            loads: whether this rank needs it. The others take part.

        Raises:
            ValueError: this process has other models.
        """
        sends = dist.get_rank() == source
        tensors = dict(self._tensors())
        layout = [(name, value.dtype, tuple(value.shape)) for name, value in tensors.items()]
        file = io.BytesIO()
        pickler = _Pickler(file)
        states = [each.state_dict() for each in self.optimizers], self._states_of_others()
        if sends:
            pickler.dump((layout, states))
        length = torch.tensor([file.tell()])
        dist.broadcast(length, source)
        text = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8) if sends else None
        if text is None:
            text = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(text, source)
        received = pickler.tensors
        if not sends:
            unpickler = _Unpickler(io.BytesIO(text.numpy().tobytes()))
            theirs, states = unpickler.load()
            received = unpickler.tensors
            if theirs != layout:
                raise ValueError(f"job.keep(): another model is kept: {_differ(theirs, layout)}")
        with torch.no_grad():
            flat = [value.detach().contiguous() for value in tensors.values()]
            for tensor in (*flat, *received):
                dist.broadcast(tensor, source)
            for tensor, value in zip(flat, tensors.values(), strict=True):
                if tensor.data_ptr() != value.data_ptr():
                    value.copy_(tensor)
        if loads and not sends:
            self._load(*states)

    def _tensors(self) -> Any:
        for number, module in enumerate(self.modules):
            for name, value in (*module.named_parameters(), *module.named_buffers()):
                yield f"{number}.{name}", value

    def _states_of_others(self) -> list[Any]:
        return [each.state_dict() for each in self.others]

    def _load(self, optimizers: list[Any], others: list[Any]) -> None:
        for optimizer, state in zip(self.optimizers, optimizers, strict=True):
            optimizer.load_state_dict(state)
        self.load_others(others)

    def change_members(self) -> None:
        """Lets DDP go on with the members of the default group.

        All of them call this, newcomers too. The buckets are then the same on all, in the order of
        the parameters; DDP makes them anew after the first step, in the order of the gradients.
        """
        self.forget_gradients()
        for model in self.models:
            update_group_of_ddp(model)(dist.group.WORLD)
            if not model.find_unused_parameters:  # else it keeps the first buckets for ever
                push_parameters_of_reducer(model.reducer)()
                rebuild_buckets_of_reducer(model.reducer)()
                reset_reducer(model.reducer)()
        for handle in self._weights:
            handle.remove()
        self._weights = []
        weight = self.samplers[0].weight() if self.samplers else 1.0
        if weight != 1:
            self._weights = [
                parameter.register_hook(lambda gradient: gradient * weight)  # type: ignore[no-untyped-call]
                for parameter in {one for model in self.models for one in model.parameters()}
                if parameter.requires_grad
            ]

    # --- the file ---------------------------------------------------------------------------------

    def write(self, path: str, step: int) -> None:
        """Writes everything to a file, which is replaced when the new one is complete."""
        optimizers = [each.state_dict() for each in self.optimizers]
        part = f"{path}.{os.getpid()}.part"
        try:
            with open(part, "wb") as file:
                states = {"optimizers": optimizers, "others": self._states_of_others()}
                torch.save({"step": step, "tensors": dict(self._tensors()), **states}, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(part)

    def read(self, path: str) -> None:
        """Loads what write() has written."""
        state = torch.load(path, weights_only=False)
        with torch.no_grad():
            for name, value in self._tensors():
                value.copy_(state["tensors"][name])
        self._load(state["optimizers"], state["others"])


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Returns what a schedule may change in a group of an optimizer."""
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in group.items()
        if name != "params"
    }


def _differ(theirs: list[Any], mine: list[Any]) -> str:
    there, here = (
        next((one for one in many if one not in others), None)
        for many, others in ((theirs, mine), (mine, theirs))
    )
    return f"{there} there, {here} here"


def _refuse(modules: list[nn.Module]) -> None:
    """Raises ValueError for what cannot go on with other members."""
    for module in modules:
        if getattr(module, "static_graph", False):
            raise ValueError(
                "job.keep(): DistributedDataParallel(static_graph=True) keeps the buckets of its "
                "first step for ever: leave static_graph out"
            )
        parts = [type(one).__name__ for one in module.modules()]
        parts += [type(one).__name__ for one in module.parameters()]
        if {"FullyShardedDataParallel", "DTensor"} & set(parts):
            raise ValueError(
                "job.keep(): a rank has shards of this model that no other has, so nobody could "
                "go on without it: train it with DistributedDataParallel"
            )
