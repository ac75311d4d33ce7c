"""What code of a step sets as attributes of modules.

Modules may keep tensors in their
attributes from one call to the next, such as the state of a recurrent layer. And they may set some
for their caller, such as the loss of a mixture of experts: these go home with the result.
"""

from __future__ import annotations

import collections
import enum
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from smddp.modelparallel.torch.activations.object_values import Change, ObjectValues
from smddp.modelparallel.torch.pipeline.lazy import Lazy

__all__ = ["CallAttributes"]

# What messages can carry as an attribute: these values, tensors, and containers of such.
_VALUES = (
    *(bool, int, float, complex, str, bytes, type(None)),
    *(torch.dtype, torch.device, torch.Size, enum.Enum),
)
_CONTAINERS = (
    *(list, tuple, dict, set, frozenset),
    *(collections.deque, collections.OrderedDict),
)
# Attributes that every module has, and those that smp gives a module.
_OWN = {*vars(nn.Module()), "forward", "_orig_forward"}
_ABSENT = object()


class CallAttributes:
    """What a module has in its attributes before a call, to find out later what the call has set.

    Attributes:
        lost: names of the attributes in which `change` has found what no message can carry, with
            the type of that.
        changed: names of the attributes in which `change` has found something else.
        in_place: names of the tensors that `change` has found changed in place.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        copied: Collection[str] = (),
        often: Collection[str] = (),
    ) -> None:
        """Notes it.

        Args:
            name: of the module.
            module: may be part of the module that is called.
            copied: attributes whose values `restore` puts back, because calls change them in place.
            often: attributes that `change` returns in any case, because calls set them often:
                calls of several microbatches may overlap, and each has its own values.
        """
        self._often = often
        self._module = module
        self._before = _attributes(module)
        # What they hold, if that can change.
        self._held = {
            one: ObjectValues(f"module {name!r}", [value])
            for one, value in self._before.items()
            if isinstance(value, (torch.Tensor, *_CONTAINERS))
        }
        self._copies = {
            one: value.detach().clone()
            for one, value in self._before.items()
            if one in copied and type(value) is torch.Tensor
        }
        self.lost: dict[str, type] = {}
        self.in_place: set[str] = set()
        self.changed: set[str] = set()

    def restore(self) -> None:
        """Gives the module what it had."""
        own = vars(self._module)
        for name in _attributes(self._module).keys() - self._before.keys():
            del own[name]
        own.update(self._before)
        for held in self._held.values():
            held.restore()
        for name, values in self._copies.items():
            own[name].detach().copy_(values)

    def change(self) -> Change | None:
        """Returns what is set now and was not before; None if nothing is."""
        now = _attributes(self._module)
        found = {}
        for name, value in now.items():
            if _is_same(self._before.get(name, _ABSENT), value):
                inside = name in self._held and self._held[name].changed()
                if not (inside or name in self._often):
                    continue
                if inside and isinstance(value, torch.Tensor):
                    self.in_place.add(name)
                if inside:
                    self.changed.add(name)
            else:
                self.changed.add(name)
            stays = _not_carried(value)
            if stays is None:
                found[name] = value
            else:
                self.lost[name] = stays
        self.changed |= self._before.keys() - now.keys()
        removed = [name for name in (self._before.keys() | {*self._often}) if name not in now]
        return Change(None, found, removed) if found or removed else None


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Returns what code has set as attributes of a module."""
    return {name: value for name, value in vars(module).items() if name not in _OWN}


def _is_same(before: Any, now: Any) -> bool:
    if before is now:
        return True
    kind = type(now)
    return kind is type(before) and issubclass(kind, _VALUES) and bool(before == now)


def _not_carried(value: Any) -> type | None:
    """Returns the type of what no message can carry in the value of an attribute; None if all is.

    Not objects of classes of the script: they may have ways to more than they show.
    """
    left, seen = [value], set()
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        kind = type(one)
        if kind in _CONTAINERS:
            left += [*one.keys(), *one.values()] if isinstance(one, dict) else one
        elif kind not in (torch.Tensor, Lazy) and not isinstance(one, _VALUES):
            return kind
    return None
