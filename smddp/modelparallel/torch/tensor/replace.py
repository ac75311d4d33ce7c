"""Replaces the marked modules of a model by distributed ones."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import reprlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from smddp._torch_internals import (
    backward_hooks,
    backward_hooks_of_tensor,
    backward_pre_hooks,
    forward_hooks,
    forward_pre_hooks,
    post_accumulate_grad_hooks,
)
from smddp.modelparallel.core.errors import SMPUsageError
from smddp.modelparallel.torch.common.creation import PARTITION
from smddp.modelparallel.torch.delayed.context import delay_param_initialization
from smddp.modelparallel.torch.delayed.life import is_delayed
from smddp.modelparallel.torch.job.meeting import done_on_all, first_difference, together
from smddp.modelparallel.torch.job.state import state
from smddp.modelparallel.torch.pipeline.takeover import note_replaced
from smddp.modelparallel.torch.tensor.marks import mark_of
from smddp.modelparallel.torch.tensor.module import DistributedModule, load_whole
from smddp.modelparallel.torch.tensor.registry import (
    Registration,
    arguments_of,
    planned_in,
    registration_of,
)

__all__ = ["alike_on_all", "replace_marked"]

log = logging.getLogger("smddp.modelparallel")


def replace_marked(root: nn.Module) -> nn.Module:
    """Replaces the outermost supported modules of those that are marked.

    It does so at any degree: scripts, checkpoints and seeds then find the same model at degree 1.

    A module stays whole if it shares a parameter or a module with a module outside it, if it has
    hooks or a forward method that its class does not have, or if the distributed module refuses its
    arguments, for instance because a size cannot be divided. The log says so, and the modules
    inside it are looked at.

    Args:
        root: the model; it is changed.

    Returns:
        The model; another module if all of it was replaced.

    Raises:
        SMPUsageError: a module was made before its class was registered, or what takes the place of
            one has no distributed module.
    """
    state.module_manager.translate_functions.clear()  # those of a model before this one
    if not any(mark_of(module) is not None for module in root.modules()):
        return root
    first = state.topology.rank == 0

    def say(text: str) -> None:
        if first:
            log.info("smp: %s", text)

    plan: dict[int, Registration] = {}
    if state.cfg.prescaled_batch:
        plan = planned_in(root, state.topology.tp_size, say)
    holders = _holders(root)
    done: dict[nn.Module, nn.Module] = {}
    unknown = {option for module in root.modules() for option in mark_of(module) or ()}

    def replaced(module: nn.Module, name: str) -> nn.Module:
        if module in done:
            return done[module]
        done[module] = new = module
        if mark_of(module) is not None and registration_of(module) is not None:
            new = _replacement(root, module, name, holders, plan, unknown, say)
            done[module] = new
            # A script may keep the original of a whole model, as one that is not trained.
            if new is not module and name:
                note_replaced(module, name)
        if new is module and not isinstance(module, DistributedModule):
            # Not named_children, which leaves out the second name of a module that has two.
            for own, child in list(module._modules.items()):
                if child is not None:
                    module._modules[own] = replaced(child, f"{name}.{own}" if name else own)
            _leave_fast_path(module)
        return new

    root = replaced(root, "")
    if unknown and first:
        log.warning(
            "smp: tensor parallelism: no module that is divided has an option %s",
            " or ".join(repr(option) for option in sorted(unknown)),
        )
    return root


def alike_on_all(make: Callable[[], nn.Module]) -> nn.Module:
    """Returns the model that `make` returns, after `replace_marked`.

    All ranks of the tp group have to call it. If it fails on one, or if models differ, it raises on
    all of them: they would wait for each other in exchanges that only some of them make.

    Args:
        make: returns the model of this rank.

    Raises:
        SMPUsageError: a module is divided on one rank, and not, or not like that, on another.
        SMPPeerError: a rank has not called this within the timeout of the process group, or `make`
            has failed on another rank.
        Exception: what `make` raises.
    """
    if not state.initialized or state.topology.tp_size == 1:
        return make()
    made: list[nn.Module] = []

    def described() -> dict[str, str]:
        made.append(make())
        for name, module in made[0].named_modules():
            if isinstance(module, DistributedModule):
                module._smp_name = name or "model"
        return _description(made[0])

    what, group = "smp.DistributedModel", state.groups.of("tp")
    with together(what, group):
        of_ranks = done_on_all(what, described, group)
    ranks = state.topology.members("tp")
    # Settings of parameters come last: where modules differ, so do their names.
    last = _DTYPE, _NEEDS
    found = first_difference(of_ranks, ranks, "not divided", lambda name: name.endswith(last))
    if found is not None:
        raise SMPUsageError(f"all ranks have to divide the same modules in the same way: {found}")
    return made[0]


_DTYPE, _NEEDS = ".dtype", ".requires_grad"


def _description(root: nn.Module) -> dict[str, str]:
    """Returns what has to be the same on all ranks of a tp group, by name."""
    found: dict[str, str] = {}
    for name, module in root.named_modules():
        if not isinstance(module, DistributedModule):
            continue
        found[name] = f"{type(module).__name__}({module.extra_repr()})"
        for part_name, part in module.named_modules(prefix=name):
            for own, parameter in part._parameters.items():
                if parameter is not None:
                    found[f"{part_name}.{own}"] = f"of shape {list(parameter.shape)}"
            # Classes of scripts may keep there what differs among ranks.
            if type(part).__module__.startswith(("smddp.", "torch.nn.")):
                options = ((own, _option(value)) for own, value in vars(part).items())
                found.update(
                    (f"{part_name}.{own}", text)
                    for own, text in options
                    if text and not own.startswith("_smp") and own != "training"
                )
    for name, parameter in root.named_parameters(remove_duplicate=False):
        found[f"{name}{_DTYPE}"] = str(parameter.dtype).removeprefix("torch.")
        found[f"{name}{_NEEDS}"] = repr(parameter.requires_grad)
    return found


def _option(value: Any) -> str:
    """Describes an argument of a module; returns "" for other attributes."""
    if isinstance(value, bool | int | float | str | tuple | None):
        return repr(value)
    return (getattr(value, "__qualname__", "") or repr(value)) if callable(value) else ""


def _holders(root: nn.Module) -> dict[int, list[nn.Module]]:
    """Returns the modules that have each parameter or module as an attribute, by its id."""
    found: dict[int, list[nn.Module]] = {}
    for module in root.modules():
        for part in (*module._parameters.values(), *module._modules.values()):
            if part is not None:
                found.setdefault(id(part), []).append(module)
    return found


def _obstacle(module: nn.Module, holders: dict[int, list[nn.Module]]) -> str:
    """Says why another module cannot take the place of a module; nothing if it can."""
    inside = {id(part) for part in module.modules()}

    def is_shared(part: Any) -> bool:
        return any(id(holder) not in inside for holder in holders[id(part)])

    for own, parameter in module.named_parameters():
        if is_shared(parameter):
            return f"it shares its parameter {own!r} with another module"
        if backward_hooks_of_tensor(parameter) or post_accumulate_grad_hooks(parameter):
            return f"its parameter {own!r} has hooks, which would be lost"
    for own, part in module.named_modules():
        if part is not module and any(True for _ in part.parameters()) and is_shared(part):
            return f"it shares its module {own!r} with another module"
        if any(hooks(part) for hooks in _HOOKS):
            return f"{f'its module {own!r}' if own else 'it'} has hooks, which would be lost"
        if "forward" in vars(part):
            what = f"its module {own!r}" if own else "it"
            return f"{what} has a forward method of its own, which would be lost"
    return ""


def _leave_fast_path(module: nn.Module) -> None:
    """Lets torch's encoder call the layers in it that are divided.

    In evaluation it would make nested tensors, and compute from weights, which are parts.
    """
    if not isinstance(module, nn.TransformerEncoderLayer | nn.TransformerEncoder):
        return
    if any(isinstance(part, DistributedModule) for part in module.modules()):
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        else:
            module.use_nested_tensor = False


_HOOKS = (forward_hooks, forward_pre_hooks, backward_hooks, backward_pre_hooks)


def _replacement(
    root: nn.Module,
    module: nn.Module,
    name: str,
    holders: dict[int, list[nn.Module]],
    plan: dict[int, Registration],
    unknown: set[str],
    say: Callable[[str], None],
) -> nn.Module:
    """Returns what takes the place of a module; itself if it stays whole.

    It takes the options that the distributed module has out of `unknown`.
    """
    kind = type(module).__name__

    def stays(reason: str) -> nn.Module:
        say(f"module {name!r} ({kind}) is not divided over tensor-parallel ranks: {reason}")
        return module

    if reason := _obstacle(module, holders):
        return stays(reason)
    registration = plan.get(id(module)) or registration_of(module)
    options = mark_of(module)
    assert registration is not None
    assert options is not None
    args, kwargs = arguments_of(module, root)
    to_smp = _unchanged
    if registration.translations is not None:
        to_smp = registration.translations("")[1]
    delayed = any(map(is_delayed, module.parameters()))
    try:
        given = (args, kwargs)
        if registration.init_hook is not None:
            given = registration.init_hook(*args, **kwargs)
    except SMPUsageError as error:
        return stays(str(error))
    place = f"the place of module {name!r} ({kind})"
    args, kwargs = _as_arguments("init_hook", registration.init_hook, place, given)
    arguments = _bound(registration.dist_module, place, args, kwargs, options)
    unknown.difference_update(arguments.signature.parameters)
    try:
        with _settings_of(module), delay_param_initialization(delayed):
            result: nn.Module = registration.dist_module(*arguments.args, **arguments.kwargs)
    except SMPUsageError as error:
        return stays(str(error))
    if not any(isinstance(part, DistributedModule) for part in result.modules()):
        raise SMPUsageError(
            f"smp.tp_register: {type(result).__name__}, which takes the place of module {name!r} "
            f"({kind}), has no smp.nn.DistributedModule in it, so nothing would be divided: "
            "inherit from smp.nn.DistributedModule, or use modules such as smp.nn.DistributedLinear"
        )
    if any(getattr(part, "gradient_checkpointing", False) is True for part in module.modules()):
        say(
            f"module {name!r} ({kind}) is divided without its gradient checkpointing: call "
            "smp.set_activation_checkpointing for its layers"
        )
    if lost := _freeze(result, module, to_smp):
        return stays(f"{type(result).__name__} has no parameter for {lost!r}, which is frozen")
    if state.cfg._match_weights:
        with delay_param_initialization(delayed):
            match: Any = getattr(result, "match", None)
            if match is not None and registration.translations is None:
                match(module)
            else:
                load_whole(result, to_smp(module.state_dict()))
    if registration.translations is not None:
        state.module_manager.translate_functions.append(registration.translations(name))
    # Hooks of torch, not a module around it: the names of its parameters stay its own.
    if registration.forward_hook is not None:
        result.register_forward_pre_hook(
            functools.partial(_translate, registration.forward_hook, place), with_kwargs=True
        )
    if registration.return_hook is not None:
        result.register_forward_hook(functools.partial(_translate_result, registration.return_hook))
    result.train(module.training)
    for part in result.modules():
        if PARTITION in vars(module):
            part.__dict__[PARTITION] = vars(module)[PARTITION]
    return result


def _unchanged(state: dict[str, Any]) -> dict[str, Any]:
    return state


def _freeze(
    result: nn.Module, module: nn.Module, to_smp: Callable[[dict[str, Any]], dict[str, Any]]
) -> str:
    """Lets those parameters need no gradient that need none in the module that is replaced.

    Args:
        result: the new module.
        module: the one that is replaced.
        to_smp: translates names of its parameters to those of `result`.

    Returns:
        The name of one that is not in `result`; nothing if all are.
    """
    needs = {
        name: parameter.requires_grad
        for name, parameter in module.named_parameters(remove_duplicate=False)
    }
    if needs and not any(needs.values()):
        result.requires_grad_(False)
    if all(needs.values()) or not any(needs.values()):
        return ""
    flags = {
        name: torch.tensor(needs[name]).expand(parameter.shape)
        for name, parameter in module.named_parameters(remove_duplicate=False)
    }
    own = dict(result.named_parameters(remove_duplicate=False))
    for name, flag in to_smp(flags).items():
        if not flag.all():
            if name not in own:
                return name
            own[name].requires_grad_(False)
    return ""


def _bound(
    dist_module: type, place: str, args: Any, kwargs: Any, options: dict[str, Any]
) -> inspect.BoundArguments:
    """Returns the arguments of what takes the place of a module, with those options that it has."""
    signature = inspect.signature(dist_module)
    try:
        given = signature.bind_partial(*args, **kwargs)
        known = signature.parameters
        given.arguments.update({key: value for key, value in options.items() if key in known})
        return signature.bind(*given.args, **given.kwargs)
    except TypeError as error:
        texts = [*map(reprlib.repr, args), *(f"{k}={reprlib.repr(v)}" for k, v in kwargs.items())]
        raise SMPUsageError(
            f"smp.tp_register: {dist_module.__name__} takes {place}, and cannot be made with the "
            f"arguments ({', '.join(texts)}): {error}; let an init_hook return its arguments"
        ) from None


def _as_arguments(
    kind: str, hook: Callable[..., Any] | None, place: str, returned: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Checks what a hook has returned that translates arguments."""
    try:
        args, kwargs = returned
        return tuple(args), {**kwargs}
    except (TypeError, ValueError):
        raise SMPUsageError(
            f"smp.tp_register: {kind} {getattr(hook, '__name__', hook)} of what takes {place} has "
            f"to return (arguments, dict of named arguments), not {reprlib.repr(returned)}"
        ) from None


def _translate(
    hook: Callable[..., Any], place: str, _: nn.Module, args: Any, kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return _as_arguments("forward_hook", hook, place, hook(*args, **kwargs))


def _translate_result(hook: Callable[..., Any], _: nn.Module, __: Any, found: Any) -> Any:
    return hook(found)


@contextlib.contextmanager
def _settings_of(module: nn.Module) -> Iterator[None]:
    """New parameters in this context get the dtype of those of a module."""
    first = next((p for p in module.parameters() if p.is_floating_point()), None)
    before = torch.get_default_dtype()
    if first is not None:
        torch.set_default_dtype(first.dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
