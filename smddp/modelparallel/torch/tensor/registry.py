"""Which distributed module takes the place of which class, and how arguments are translated."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from smddp.modelparallel.core.errors import SMPUsageError
from smddp.modelparallel.torch.tensor.embedding import DistributedEmbedding
from smddp.modelparallel.torch.tensor.linear import DistributedLinear

__all__ = [
    "Registration",
    "add_finder",
    "add_planner",
    "arguments_of",
    "planned_in",
    "registration_of",
    "tp_register",
    "tp_register_with_module",
]

_Class = TypeVar("_Class", bound=type)
_Hook = Callable[..., Any]

# Attribute of modules of registered classes: the arguments of `__init__`. It does not belong to the
# model.
_ARGUMENTS = "_smp_init_arguments"


@dataclasses.dataclass(frozen=True)
class Registration:
    """What takes the place of a class.

    Attributes:
        dist_module: a class of modules.
        init_hook: translates the arguments of `__init__`; None if they are the same.
        forward_hook: translates the arguments of `forward`; None if they are the same.
        return_hook: translates the result of `forward`; None if it is the same.
        translations: returns translations of a model's state, from names of the new module and to
            them, for the name that the module has in the model; None if the names are the same, or
            the class of the new module knows.
    """

    dist_module: type[nn.Module]
    init_hook: _Hook | None = None
    forward_hook: _Hook | None = None
    return_hook: _Hook | None = None
    translations: Callable[[str], tuple[_Hook, _Hook]] | None = None


def _linear_arguments(module: nn.Linear, _: nn.Module) -> dict[str, Any]:
    return {
        "in_features": module.in_features,
        "out_features": module.out_features,
        "bias": module.bias is not None,
        "device": module.weight.device,
        "dtype": module.weight.dtype,
    }


_OF_EMBEDDING = (
    *("num_embeddings", "embedding_dim", "padding_idx", "max_norm", "norm_type"),
    *("scale_grad_by_freq", "sparse"),
)


def _embedding_arguments(module: nn.Embedding, _: nn.Module) -> dict[str, Any]:
    own = {name: getattr(module, name) for name in _OF_EMBEDDING}
    return {**own, "device": module.weight.device, "dtype": module.weight.dtype}


# Returns the named arguments with which a module was made, for it and the model that it is in.
_ArgumentsOf = Callable[[Any, nn.Module], dict[str, Any]]
_registrations: dict[type, Registration] = {
    nn.Linear: Registration(DistributedLinear),
    nn.Embedding: Registration(DistributedEmbedding),
}
# Modules of these classes keep their arguments, so `__init__` needs no wrapper.
_ARGUMENTS_OF: dict[type, _ArgumentsOf] = {
    nn.Linear: _linear_arguments,
    nn.Embedding: _embedding_arguments,
}


_Found = tuple[Registration, _ArgumentsOf]
_finders: list[Callable[[type], _Found | None]] = []


def add_finder(finder: Callable[[type], _Found | None]) -> None:
    """Lets a function be asked for classes of libraries that smddp does not import.

    Args:
        finder: returns for a class what takes its place, and a function that returns the named
            arguments with which a module of it, in a model, was made; None for other classes.
    """
    _finders.append(finder)


_Planner = Callable[[nn.Module, int, Callable[[str], None]], dict[int, Registration]]
_planners: list[_Planner] = []


def add_planner(planner: _Planner) -> None:
    """Lets a function choose what takes the place of single modules of a model.

    Args:
        planner: gets a model, the size of tp groups, and a function that logs a text; returns what
            takes the place of modules, by their ids.
    """
    _planners.append(planner)


def planned_in(root: nn.Module, size: int, say: Callable[[str], None]) -> dict[int, Registration]:
    """Returns what planners have chosen for the modules of a model, by their ids."""
    return {key: value for plan in _planners for key, value in plan(root, size, say).items()}


def registration_of(module: nn.Module) -> Registration | None:
    """Returns what takes the place of a module; None if nothing does.

    Modules of a class that only inherits from a registered one stay as they are.
    """
    kind = type(module)
    if kind not in _registrations:
        found = next((found for finder in _finders if (found := finder(kind)) is not None), None)
        if found is not None:
            _registrations[kind], _ARGUMENTS_OF[kind] = found
    return _registrations.get(kind)


def arguments_of(module: nn.Module, root: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments with which a module of a registered class was made.

    Args:
        module: of the model.
        root: the model.

    Raises:
        SMPUsageError: it was made before its class was registered.
    """
    kept = vars(module).get(_ARGUMENTS)
    if kept is not None:
        args, kwargs = kept
        return args, dict(kwargs)
    of_class = _ARGUMENTS_OF.get(type(module))
    if of_class is None:
        raise SMPUsageError(
            f"a {type(module).__name__} was made before smp.tp_register knew its class, so the "
            "arguments of its __init__ are not known: register classes before the model is made"
        )
    return (), of_class(module, root)


def tp_register_with_module(
    module_cls: type,
    dist_module: type,
    init_hook: _Hook | None = None,
    forward_hook: _Hook | None = None,
    return_hook: _Hook | None = None,
) -> None:
    """Lets a distributed module take the place of modules of a class.

    Args:
        module_cls: a class of modules. Those of classes that inherit from it are not meant.
        dist_module: the class that takes its place: a `smp.nn.DistributedModule`, or a class of
            modules with such modules inside, which smp.DistributedModel checks.
        init_hook: gets the arguments of `module_cls.__init__`, without self; returns those of
            `dist_module`, as an iterable and a dict. Without it they are the same.
        forward_hook: gets the arguments of `module_cls.forward`, without self; returns those of
            `dist_module.forward`, likewise. Without it they are the same.
        return_hook: gets the result of `dist_module.forward`; returns that of
            `module_cls.forward`. Without it they are the same.

    Raises:
        TypeError: a class is none of modules, or a hook has another signature than the method whose
            arguments it gets.
    """
    for name, kind in (("module_cls", module_cls), ("dist_module", dist_module)):
        if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
            raise TypeError(f"smp.tp_register: {name} must be a class of modules, not {kind!r}")
    for name, hook, method in (
        ("init_hook", init_hook, "__init__"),
        ("forward_hook", forward_hook, "forward"),
    ):
        if hook is not None:
            _check_signature(f"{name} {_name_of(hook)}", hook, module_cls, method)
    if return_hook is not None and not callable(return_hook):
        raise TypeError(f"smp.tp_register: return_hook must be a function, not {return_hook!r}")
    known = module_cls in _registrations
    _registrations[module_cls] = Registration(dist_module, init_hook, forward_hook, return_hook)
    if not known:
        _keep_arguments(module_cls)


def tp_register(
    dist_module: type,
    init_hook: _Hook | None = None,
    forward_hook: _Hook | None = None,
    return_hook: _Hook | None = None,
) -> Callable[[_Class], _Class]:
    """Returns a decorator of a class of modules; `dist_module` takes the place of its modules.

    Arguments and errors are those of `tp_register_with_module`.
    """

    def register(module_cls: _Class) -> _Class:
        tp_register_with_module(module_cls, dist_module, init_hook, forward_hook, return_hook)
        return module_cls

    return register


def _name_of(hook: _Hook) -> str:
    return getattr(hook, "__name__", repr(hook))


def _check_signature(what: str, hook: _Hook, module_cls: type, method: str) -> None:
    """Raises TypeError unless a hook takes the parameters of a method, without self."""
    if not callable(hook):
        raise TypeError(f"smp.tp_register: {what} must be a function")
    own = list(inspect.signature(getattr(module_cls, method)).parameters.values())[1:]
    given = list(inspect.signature(hook).parameters.values())
    expected = ", ".join(map(_text, own))
    if [_text(parameter) for parameter in given] == [_text(parameter) for parameter in own]:
        return
    difference = next(
        (
            f"parameter {number} is {_text(mine)!r} and has to be {_text(wanted)!r}"
            for number, (mine, wanted) in enumerate(zip(given, own, strict=False), 1)
            if _text(mine) != _text(wanted)
        ),
        f"it takes {len(given)} parameters and has to take {len(own)}",
    )
    raise TypeError(
        f"smp.tp_register: {what} must have the signature of {module_cls.__name__}.{method} "
        f"without self, ({expected}): {difference}"
    )


def _text(parameter: inspect.Parameter) -> str:
    """Describes a parameter by kind, name and default; annotations may differ."""
    kinds: dict[Any, str] = {
        inspect.Parameter.VAR_POSITIONAL: "*",
        inspect.Parameter.VAR_KEYWORD: "**",
    }
    only = " (keyword only)" if parameter.kind is inspect.Parameter.KEYWORD_ONLY else ""
    default = "" if parameter.default is inspect.Parameter.empty else f"={parameter.default!r}"
    return f"{kinds.get(parameter.kind, '')}{parameter.name}{default}{only}"


def _keep_arguments(module_cls: Any) -> None:
    """Lets modules of a class keep the arguments with which they were made."""
    original = module_cls.__init__

    @functools.wraps(original)
    def init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        # Classes that inherit from it call it with arguments of their own.
        if type(self) is module_cls:
            self.__dict__[_ARGUMENTS] = args, kwargs

    module_cls.__init__ = init
