"""The parameters of a model by name, wherever they live."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from smddp.modelparallel.torch.pipeline.method import READS, Use
from smddp.modelparallel.torch.pipeline.modules import Modules
from smddp.modelparallel.torch.pipeline.protocol import Call
from smddp.modelparallel.torch.pipeline.references import references
from smddp.modelparallel.torch.pipeline.remote_tensor import RemoteTensor

__all__ = ["Parameters"]


class Parameters:
    """Names of the model's parameters."""

    def __init__(self, modules: Modules) -> None:
        self._modules = modules
        self._by_name = {name: number for number, name in enumerate(modules.names)}
        self._by_name[""] = 0
        self._names: dict[int, str] = {}  # by id

    def name_of(self, parameter: torch.Tensor) -> str | None:
        """Returns the name in the model of a parameter; None if it is not of the model."""
        found = self._names.get(id(parameter))
        if found is None or self.find(found) is not parameter:
            modules = self._modules
            self._names = {
                id(one): modules.full_name(number, name)
                for number, module in reversed(list(enumerate(modules.by_number)))
                for name, one in module._parameters.items()
                if one is not None
            }
            found = self._names.get(id(parameter))
        return found

    def find(self, full: str) -> nn.Parameter | None:
        """Returns the parameter with a name; None if there is none."""
        prefix, _, name = full.rpartition(".")
        number = self._by_name.get(prefix)
        return None if number is None else self._modules.by_number[number]._parameters.get(name)

    def canonical(self, full: str) -> str:
        """Returns the first name of a parameter, which may have several."""
        parameter = self.find(full)
        return full if parameter is None else self.name_of(parameter) or full

    def name_of_read(self, call: Call) -> str | None:
        """Returns the name of the parameter that a call reads."""
        parameter = self._modules.by_number[call.module]._parameters[call.method.name]
        return None if parameter is None else self.name_of(parameter)

    def reach(self, calls: Iterable[Call]) -> frozenset[str]:
        """Returns the names of the parameters that calls may use.

        These are the parameters of their modules, of the modules inside these, and those to which
        attributes of these modules refer.
        """
        found: set[str | None] = set()
        for call in calls:
            if call.method.use is Use.PARAMETER:
                found.add(self.name_of_read(call))
            elif call.method.use not in READS:
                found.update(map(self.name_of, _used(self._modules.by_number[call.module])))
        return frozenset(name for name in found if name is not None)

    def local(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Returns those of the named parameters that live here and are trained, by name."""
        found = {name: self.find(name) for name in names}
        return {
            name: one
            for name, one in found.items()
            if one is not None and not isinstance(one, RemoteTensor) and one.requires_grad
        }


def _used(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yields the parameters to which a module's code can get."""
    left: list[Any] = [module]
    seen: dict[int, Any] = {}  # the objects, too: `references` may make one, whose id comes again
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, nn.Parameter):
            yield value
        else:
            left += [one for _, one in references(value)]
