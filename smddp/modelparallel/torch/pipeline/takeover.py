"""Takes over the calls of modules from torch.

`nn.Module._call_impl` is replaced until `smp.shutdown`, for all modules. A call of a module of the
model goes to `Routing.enter`, which decides where it runs; all other calls go on as usual. Modules
that live elsewhere get a `forward` of their own, too; in copies of them it raises.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from typing import Any

from torch import nn

from smddp._torch_internals import MODULE_CALLS, until_undone
from smddp.modelparallel.core.baton import Current
from smddp.modelparallel.core.errors import SMPUsageError
from smddp.modelparallel.torch.pipeline.asker import ModelAsker
from smddp.modelparallel.torch.pipeline.lazy import patch_function_apply
from smddp.modelparallel.torch.pipeline.method import CALL, FORWARD
from smddp.modelparallel.torch.pipeline.modules import Modules
from smddp.modelparallel.torch.pipeline.parameters import Parameters
from smddp.modelparallel.torch.pipeline.passes import patch_engine
from smddp.modelparallel.torch.pipeline.remote_tensor import patch_torch
from smddp.modelparallel.torch.pipeline.routing import Routing

__all__ = ["Takeover", "forget_owner", "note_replaced"]


class Takeover:
    """A model whose calls go to its routing, as long as this lives.

    Attributes:
        modules: of the model.
        parameters: their names.
        routing: takes the calls.
        asker: for backward passes.
        current: the task of each thread.
    """

    def __init__(
        self,
        current: Current,
        modules: Modules,
        parameters: Parameters,
        routing: Routing,
        asker: ModelAsker,
    ) -> None:
        """Takes over nothing yet."""
        self.current, self.modules, self.parameters = current, modules, parameters
        self.routing, self.asker = routing, asker

    def install(self) -> None:
        """Begins to handle the calls of these modules."""
        _models.append(weakref.ref(self))
        MODULE_CALLS.install(_to_owners)
        _refuse_new_parameters()
        patch_function_apply()
        patch_torch()
        patch_engine(_asker)

    def take_forward(self) -> None:
        """Makes `module.forward(...)` of a module that lives elsewhere a call, too."""
        modules = self.modules
        for number, owner in enumerate(modules.owners):
            if owner is not None and owner != modules.rank:
                forward = _RemoteForward(self.routing, modules, number)
                object.__setattr__(modules.by_number[number], "forward", forward)

    @property
    def runs(self) -> bool:
        """Whether code of a step of this model runs on this thread."""
        task = self.current.task
        return task is not None and task.frame is not None


# The models of the process, usually one. The newest one is asked first.
_models: list[weakref.ref[Takeover]] = []
# Modules in whose place another one is now, with those inside them, and the names of the former.
_replaced: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()


def note_replaced(module: nn.Module, name: str) -> None:
    """Notes that another module has taken the place of a module, and is called in a step.

    Args:
        module: the original.
        name: in the model.
    """
    _replaced.update(dict.fromkeys(module.modules(), name))


def _to_owners(original: Any) -> Any:
    """Returns what `nn.Module.__call__` calls in place of the original."""

    @functools.wraps(original)
    def call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        for reference in reversed(_models):
            model = reference()
            if model is None:
                _models.remove(reference)
                continue
            number = model.modules.numbers.get(id(module))
            if number is not None:
                return model.routing.enter(number, CALL, args, kwargs)
            if _replaced and module in _replaced and (model.routing.calling or model.runs):
                raise SMPUsageError(
                    f"module {_replaced[module]!r} was divided over tensor-parallel ranks by "
                    "smp.DistributedModel, which has put another module in its place, and code of "
                    "the step still calls the original, which is not trained. Keep modules in a "
                    "torch.nn.ModuleList, not in a list or a closure; or call "
                    "smp.set_tensor_parallelism(module, False) before"
                )
        return original(module, *args, **kwargs)

    return call


def _in_step() -> Takeover | None:
    """Returns the model of the step whose code runs on this thread; None outside steps."""
    for reference in reversed(_models):
        model = reference()
        if model is not None and model.runs:
            return model
    return None


def _asker() -> ModelAsker | None:
    model = _in_step()
    return None if model is None else model.asker


def _refuse_new_parameters() -> None:
    """Makes modules of a model raise if code of a step gives them a parameter."""
    register = nn.modules.module.register_module_parameter_registration_hook
    until_undone("smp", "parameters", lambda: register(_refuse_new_parameter).remove)


def _refuse_new_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    model = _in_step()
    number = None if model is None else model.modules.number_of(module)
    if model is None or number is None or model.parameters.name_of(parameter) is not None:
        return
    raise SMPUsageError(
        f"code of the step gives module {model.modules.names[number]!r} a new parameter {name!r}. "
        "Other ranks would not know it, and no optimizer and no reduction of gradients: make it in "
        "the module's constructor, or call the model once before smp.DistributedModel"
    )


class _RemoteForward:
    """The `forward` of a module that lives elsewhere."""

    def __init__(self, routing: Routing, modules: Modules, number: int) -> None:
        self._routing = weakref.ref(routing)
        self._number = number
        self._name, self._owner = modules.names[number], modules.owners[number]
        self._class = type(modules.by_number[number])

    @property
    def __signature__(self) -> inspect.Signature:
        """The parameters that code finds which passes only what a forward method takes."""
        return inspect.signature(functools.partial(self._class.forward, None))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        routing = self._routing()
        if routing is None:
            raise SMPUsageError("the model that this module belonged to is gone")
        return routing.enter(self._number, FORWARD, args, kwargs)

    def __deepcopy__(self, memo: Any) -> _CopiedForward:
        return _CopiedForward(self._name, self._owner)

    def __reduce__(self) -> Any:
        raise SMPUsageError("a module that lives on another rank cannot be pickled on this one")


class _CopiedForward:
    """The `forward` of a copy of a module that lives elsewhere."""

    def __init__(self, name: str, owner: int | None) -> None:
        self._name, self._owner = name, owner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise SMPUsageError(
            f"this is a copy of module {self._name!r}, which lives on rank {self._owner} of the "
            "pipeline, and so do the parameters of the copy. Copy them back into the model's, on "
            "all ranks, and call the model"
        )


def forget_owner(copied: nn.Module) -> None:
    """Gives a copy of a module that lives elsewhere the `forward` of its class again.

    Args:
        copied: the copy; its parameters have values or shapes of their own.
    """
    if isinstance(copied.__dict__.get("forward"), _CopiedForward):
        object.__delattr__(copied, "forward")
