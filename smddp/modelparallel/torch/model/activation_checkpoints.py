"""Which modules of a model have activation checkpointing, and how it fits the division."""

from __future__ import annotations

import logging
import types
import weakref
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn

from smddp.modelparallel.core.errors import SMPPartitionError, SMPUsageError
from smddp.modelparallel.torch.activations.region import layer_arguments
from smddp.modelparallel.torch.pipeline.model import PipelineModel

__all__ = ["ActivationCheckpoints"]

log = logging.getLogger("smddp.modelparallel")


class _Mark(NamedTuple):
    """What a script has asked for a module.

    Attributes:
        preserve: draw the same random numbers in both runs.
        size: how many layers of an nn.Sequential one checkpoint covers; 0 for the module itself.
    """

    preserve: bool
    size: int


class ActivationCheckpoints:
    """The marks of `smp.set_activation_checkpointing`; they take effect once the model is divided.

    A checkpoint is around calls on one rank. So the modules of a checkpoint have to live on one
    rank, with everything inside them.
    """

    def __init__(self, model: PipelineModel, manual: bool, warns: bool) -> None:
        """Begins without marks.

        Args:
            model: whose modules are marked.
            manual: the script itself divides the model. A module that lives on several ranks is an
                error then, else only a warning.
            warns: does this rank log the warning?
        """
        self._model, self._modules = model, model.modules
        self._manual, self.warns = manual, warns
        self._marks: dict[int, _Mark] = {}
        self._warned: set[int] = set()
        self._divided = False

    @property
    def digest(self) -> int:
        """A number that is the same on two ranks if all marks are."""
        return zlib.crc32(repr(sorted(self._marks.items())).encode()) if self._marks else 0

    @property
    def any(self) -> bool:
        """Whether any module has been marked."""
        return bool(self._marks)

    def mark(self, module: nn.Module, preserve: bool, strategy: str, packed: bool) -> None:
        """Gives a module activation checkpointing; a later call for the same module replaces it.

        Args:
            module: of the model.
            preserve: draw the same random numbers in both runs.
            strategy: see `smp.set_activation_checkpointing`.
            packed: was `pack_args_as_tuple` given?

        Raises:
            SMPUsageError: the module is not of the model, or the arguments do not fit it.
            SMPPartitionError: the script divides the model, and this module lives on several ranks.
        """
        call = "smp.set_activation_checkpointing"
        kind = type(module).__name__
        if not isinstance(module, nn.Module):
            raise SMPUsageError(
                f"{call} takes a module, such as model.get_module().encoder, not a {kind}"
            )
        number = self._modules.number_of(module)
        if number is None:
            raise SMPUsageError(
                f"{call}: the {kind} is not part of the model that smp.DistributedModel has "
                "wrapped: take a module from model.get_module()"
            )
        containers = nn.ModuleList, nn.ModuleDict
        if isinstance(module, containers) and type(module).forward is nn.Module.forward:
            raise SMPUsageError(
                f"{call}: {self._modules.names[number]!r} is a {kind}, which is never called "
                "itself: mark each of the modules in it"
            )
        if not isinstance(module, nn.Sequential):
            if strategy != "each" or packed:
                raise SMPUsageError(
                    f"{call}: strategy and pack_args_as_tuple are for an nn.Sequential, and "
                    f"{self._modules.names[number]!r} is a {kind}"
                )
            mark = _Mark(preserve, 0)
        else:
            size = group_size(strategy, len(module), call)
            own_forward = type(module).forward is not nn.Sequential.forward or (
                self._modules.lives_here(number)
                and not isinstance(module.__dict__.get("forward", None), _Grouped | None)
            )
            if own_forward and strategy.startswith("group"):
                raise SMPUsageError(
                    f"{call}: {kind} has a forward method of its own, so its "
                    "layers cannot be grouped: use the strategy 'each' or 'contiguous'"
                )
            mark = _Mark(preserve, 0 if own_forward and strategy == "contiguous" else size)
        before = dict(self._marks)
        self._marks.pop(number, None)
        self._marks[number] = mark
        if self._divided:
            try:
                self.check(self._modules.owners)
            except SMPPartitionError:
                self._marks = before
                raise
            self.apply()

    def check(self, owners: Sequence[int | None]) -> None:
        """Checks that a division of the model leaves each checkpoint on one rank.

        Args:
            owners: of the modules, by number.

        Raises:
            SMPPartitionError: it does not, and the script itself divides the model.
        """
        for number, mark in self._marks.items():
            for part in self._modules.layers(number) if mark.size else [number]:
                self.allows(part, owners)

    def allows(self, number: int, owners: Sequence[int | None] | None = None) -> bool:
        """Says whether a module lives on one rank, with everything inside it.

        Args:
            number: of the module.
            owners: of the modules, by number; None for those of the division in force.

        Raises:
            SMPPartitionError: it does not, and the script itself divides the model.
        """
        found = self._owners_in(number, self._modules.owners if owners is None else owners)
        if len(found) <= 1:
            return True
        ranks = " and ".join(map(str, sorted(found)))
        text = (
            f"activation checkpointing: module {self._modules.names[number]!r} lives on ranks "
            f"{ranks} of the pipeline, and has to live on one"
        )
        if self._manual:
            raise SMPPartitionError(
                f"{text}. Checkpoint the modules inside it, or assign all of it to one partition"
            )
        if self.warns and number not in self._warned:
            self._warned.add(number)
            log.warning("smp: %s: its activations are kept. Checkpoint the modules inside it", text)
        return False

    def _owners_in(self, number: int, owners: Sequence[int | None]) -> set[int]:
        found = set()
        for part in self._modules.by_number[number].modules():
            inner = self._modules.number_of(part)
            assert inner is not None
            if (owner := owners[inner]) is not None:
                found.add(owner)
        return found

    def apply(self) -> None:
        """Lets the marks take effect; the division is in force."""
        self._divided = True
        modules = self._modules
        recomputed: dict[int, bool] = {}
        for number, mark in self._marks.items():
            module = modules.by_number[number]
            if isinstance(module.__dict__.get("forward"), _Grouped):
                object.__delattr__(module, "forward")
            # Layers one by one are marked themselves: so it does not matter who calls them.
            if mark.size > 1:
                if "forward" not in module.__dict__:  # it lives here
                    object.__setattr__(module, "forward", _Grouped(self, module, mark))
                continue
            for part in modules.layers(number) if mark.size else [number]:
                if self.allows(part):
                    recomputed[part] = mark.preserve
        self._model.local.recompute(recomputed)

    def regions(self) -> list[tuple[int, ...]]:
        """Returns the modules, by number, that are computed again together.

        Modules that live on several ranks are not among them. Those of single calls
        (`patches.checkpoint`) are not known.
        """
        found: list[tuple[int, ...]] = []
        for number, mark in self._marks.items():
            layers = self._modules.layers(number) if mark.size else [number]
            if mark.size > 1:
                groups = self._groups(layers, mark.size)
                found += [tuple(layers[begin:end]) for begin, end in groups]
            else:
                found += [(layer,) for layer in layers]
        owners = self._modules.owners
        return [
            group
            for group in found
            if len(group) > 1 or len(self._owners_in(group[0], owners)) <= 1
        ]

    def run_sequence(
        self, module: nn.Module, value: Any, size: int, spread: bool, preserve: bool
    ) -> Any:
        """Runs an nn.Sequential with checkpoints; each covers layers on one rank.

        Args:
            module: the nn.Sequential, of the model.
            value: of the first layer.
            size: how many layers a checkpoint covers at most.
            spread: see `layer_arguments`.
            preserve: draw the same random numbers in both runs.

        Returns:
            What the last layer returns.

        Raises:
            SMPPartitionError: the script divides the model, and a layer lives on several ranks.
        """
        modules = self._modules
        number = modules.number_of(module)
        assert number is not None
        layers = modules.layers(number)
        for begin, end in self._groups(layers, size):
            if end == begin + 1 and not self.allows(layers[begin]):
                layer = modules.by_number[layers[begin]]
                value = layer(*layer_arguments(layer, value, spread))
            else:
                value = self._model.routing.call_layers(number, begin, end, value, spread, preserve)
        return value

    def _groups(self, layers: Sequence[int], size: int) -> list[tuple[int, int]]:
        """Returns (first layer, the one after the last) of the groups, each within one rank."""
        groups: list[tuple[int, int]] = []
        begin, place = 0, None
        for position, layer in enumerate(layers):
            owners = self._owners_in(layer, self._modules.owners)
            # A layer on several ranks is a group of its own. One without state joins the others.
            here = None if not owners else next(iter(owners)) if len(owners) == 1 else -1 - position
            other = here is not None and place is not None and here != place
            if position > begin and (other or position - begin == size):
                groups.append((begin, position))
                begin, place = position, None
            place = place if here is None else here
            if place is not None and place < 0:
                groups += [(begin, position)] if position > begin else []
                groups.append((position, position + 1))
                begin, place = position + 1, None
        if begin < len(layers):
            groups.append((begin, len(layers)))
        return groups


class _Grouped:
    """The `forward` of an nn.Sequential whose layers are computed again in groups."""

    def __init__(self, owner: ActivationCheckpoints, module: nn.Module, mark: _Mark) -> None:
        self._owner, self._module = weakref.ref(owner), weakref.ref(module)
        self._mark = mark

    def __call__(self, input: Any) -> Any:
        owner, module = self._owner(), self._module()
        assert module is not None
        if owner is None:
            return nn.Sequential.forward(module, input)  # type: ignore[arg-type, no-untyped-call]
        return owner.run_sequence(module, input, self._mark.size, False, self._mark.preserve)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # `copy.deepcopy` has made the copy of the module before it copies the attributes.
        return _own_forward(memo[id(self._module())])

    def __reduce__(self) -> Any:
        return _own_forward, (self._module(),)


def _own_forward(module: nn.Sequential) -> Any:
    """Returns the `forward` of a copy."""
    return types.MethodType(nn.Sequential.forward, module)


def group_size(strategy: str, count: int, call: str) -> int:
    """Returns how many layers of a sequence one checkpoint covers.

    Args:
        strategy: "each" for one, "contiguous" for all, "group_2" for two, and so on.
        count: how many there are.
        call: what the script has called, for the error.

    Raises:
        SMPUsageError: there is no such strategy.
    """
    if strategy == "each":
        return 1
    if strategy == "contiguous":
        return max(count, 1)
    kind, _, number = strategy.partition("_") if isinstance(strategy, str) else ("", "", "")
    if kind == "group" and number.isdecimal() and int(number) > 0:
        return int(number)
    raise SMPUsageError(
        f"{call}: strategy must be 'each', 'contiguous' or 'group_' and a number, not {strategy!r}"
    )
