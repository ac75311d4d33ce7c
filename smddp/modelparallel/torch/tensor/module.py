"""The base class of modules whose parameters are divided over the ranks of a tp group."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from smddp.modelparallel.core.errors import SMPUsageError
from smddp.modelparallel.torch.common.dtypes import convert
from smddp.modelparallel.torch.job.state import state
from smddp.modelparallel.torch.pipeline.randomness import draw_seed, mix, seeded
from smddp.modelparallel.torch.tensor.division import Division, mark
from smddp.modelparallel.torch.tensor.exchange import Exchange, SequenceExchange

__all__ = [
    "DistributedModule",
    "Division",
    "divisions_of",
    "is_divided",
    "load_whole",
    "mark_divided",
    "sequence_multiple",
]


class DistributedModule(nn.Module):
    """A module that does a part of its work on each rank of a tp group.

    Its parameters are of two kinds. A *divided* parameter is made with a dimension: this rank has
    a part of it. It is used on the examples of all ranks of the group (the form "all" of
    `Exchange`). Every other parameter is a *replica*: it is whole on every rank, and is used on the
    examples of this rank only (the form "own"). Gradients are averaged accordingly.

    With `fp16_params` in the configuration, a module is converted to fp16 when its `__init__` has
    ended, with everything inside it.

    Attributes:
        exchange: exchanges activations with the other ranks of the group.
        divisions: how each divided parameter is divided, by its name in this module; those of
            inner modules are not included.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Lets `__init__` of a class end with the conversion that `fp16_params` asks for."""
        super().__init_subclass__(**kwargs)
        original = cls.__init__

        @functools.wraps(original)
        def init(self: DistributedModule, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            # Classes that inherit from it go on when this has ended.
            if type(self) is cls and state.initialized and state.cfg.fp16_params:
                convert(self, torch.float16, state.cfg._fp32_grad_accumulation)

        cls.__init__ = init  # type: ignore[method-assign]

    def __init__(self, exchange: Exchange | None = None) -> None:
        """Begins without parameters.

        Args:
            exchange: None for the one of this rank's tp group, as configured.

        Raises:
            SMPInitializationError: `smp.init` has not been called, and no exchange is given.
        """
        super().__init__()
        if exchange is None:
            exchange = Exchange.of_job()
        self.exchange = exchange
        self.divisions: dict[str, Division] = {}
        self._smp_name = ""  # `alike_on_all` sets it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module, and notes that it makes the exchanges that follow."""
        self.exchange.collectives.enter(self._smp_name)
        return super().__call__(*args, **kwargs)

    def new_parameter(
        self,
        name: str,
        shape: tuple[int, ...],
        initialize: Callable[[Tensor], object],
        division: Division | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> nn.Parameter:
        """Makes a parameter, as the attribute `name`.

        The whole parameter is initialised, and this rank's part of it kept. So if all ranks have
        the same seed, the values are those of one process, and the random numbers that follow as
        well. With another seed on each rank the values are as random.

        Args:
            name: without dots.
            shape: of the whole parameter.
            initialize: sets the values of a whole parameter, in place.
            division: None for a replica.
            device: torch's default if None.
            dtype: torch's default if None.

        Returns:
            The parameter.

        Raises:
            SMPUsageError: the number of ranks does not divide the dimension.
        """
        whole = torch.empty(shape, device=device, dtype=dtype)
        size = self.exchange.size
        if division is not None and shape[division.dimension] % size:
            raise SMPUsageError(
                f"{type(self).__name__}: {name} of shape {list(shape)} cannot be divided over "
                f"{size} tensor-parallel ranks: dimension {division.dimension} has to be a "
                f"multiple of {size}"
            )
        with torch.no_grad():
            initialize(whole)
            if division is not None and size > 1:
                whole = division.part(whole, self.exchange.rank, size)
                self.divisions[name] = division
        parameter = nn.Parameter(whole)
        setattr(self, name, parameter)
        return parameter

    def load_whole(self, entries: Mapping[str, Tensor]) -> None:
        """Copies values of one process: of a divided parameter this rank's part.

        Args:
            entries: whole values of all parameters and buffers, by their names in this module and
                the modules inside it.

        Raises:
            RuntimeError: an entry is missing, unknown, or of another shape.
        """
        load_whole(self, entries)

    def match(self, original: nn.Module) -> None:
        """Takes over the weights of the module that this one replaces.

        A class whose names are not those of the original overrides it, and calls `load_whole`.

        Args:
            original: whole.
        """
        self.load_whole(original.state_dict())

    @contextlib.contextmanager
    def own_random_numbers(self) -> Iterator[None]:
        """In this context the random numbers differ among the ranks of the group.

        It is for dropout of a part of the features: ranks whose generators are in the same state
        would leave out the same places of different parts. The generators go on afterwards as if
        one number had been drawn.
        """
        with seeded(mix(draw_seed(), self.exchange.rank)):
            yield


def load_whole(root: nn.Module, entries: Mapping[str, Tensor]) -> None:
    """Does what `DistributedModule.load_whole` does, for any module with such modules inside."""
    divided = {name: (division, exchange) for name, division, exchange in _divided(root)}
    parts = dict(entries)
    for name in divided.keys() & entries.keys():
        division, exchange = divided[name]
        parts[name] = division.part(entries[name], exchange.rank, exchange.size)
    root.load_state_dict(parts)


def _divided(root: nn.Module) -> Iterator[tuple[str, Division, Exchange]]:
    # A module that is reachable by several names has entries of all of them in a state dict.
    for prefix, module in root.named_modules(remove_duplicate=False):
        if isinstance(module, DistributedModule):
            for name, division in module.divisions.items():
                yield f"{prefix}.{name}" if prefix else name, division, module.exchange


def divisions_of(root: nn.Module) -> dict[str, Division]:
    """Returns how the parameters of a model are divided.

    Args:
        root: the model.

    Returns:
        A value for each divided parameter, by its names in the model.
    """
    return {name: division for name, division, _ in _divided(root)}


def is_divided(root: nn.Module) -> bool:
    """Says whether a model has a module that exchanges activations with other ranks."""
    return any(
        isinstance(module, DistributedModule) and module.exchange.size > 1
        for module in root.modules()
    )


def sequence_multiple(root: nn.Module) -> int:
    """Returns what has to divide the length of sequences: 1 unless a model divides these."""
    exchanges = (m.exchange for m in root.modules() if isinstance(m, DistributedModule))
    return max((x.size for x in exchanges if isinstance(x, SequenceExchange)), default=1)


def mark_divided(root: nn.Module) -> None:
    """Marks the divided parameters of a model, for `division_of`."""
    mark(
        (module._parameters[name], division)
        for module in root.modules()
        if isinstance(module, DistributedModule)
        for name, division in module.divisions.items()
    )
