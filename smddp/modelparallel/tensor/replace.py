"""Replaces the marked modules of a model by distributed ones."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from smddp.modelparallel.job.meeting import gathered
from smddp.modelparallel.job.state import state
from smddp.modelparallel.tensor.marks import mark_of
from smddp.modelparallel.tensor.module import DistributedModule
from smddp.modelparallel.tensor.registry import (
    Registration,
    arguments_of,
    planned_in,
    registration_of,
)
from smddp_smp.errors import SMPUsageError

__all__ = ["check_alike", "replace_marked"]

log = logging.getLogger("smddp.modelparallel")


def replace_marked(root: nn.Module) -> nn.Module:
    """Replaces the outermost supported modules of those that are marked.

    It does so at any degree: scripts, checkpoints and seeds then find the same model at degree 1.

    A module stays whole if it shares a parameter with a module outside it, or if the distributed
    module refuses its arguments, for instance because a size cannot be divided. The log says so.

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
    new: dict[int, nn.Module] = {}
    unknown = {option for module in root.modules() for option in mark_of(module) or ()}
    for parent, child_name, full_name, module in list(_candidates(root)):
        if id(module) not in new:
            new[id(module)] = _replacement(root, module, full_name, holders, plan, unknown, say)
        if parent is None:
            root = new[id(module)]
        else:
            parent._modules[child_name] = new[id(module)]
    if unknown and first:
        log.warning(
            "smp: tensor parallelism: no module that is divided has an option %s",
            " or ".join(repr(option) for option in sorted(unknown)),
        )
    return root


def check_alike(root: nn.Module) -> None:
    """Raises on all ranks of the tp group, which all have to call it, if their models differ.

    They would wait for each other in exchanges that only some of them make.

    Args:
        root: the model, after `replace_marked`.

    Raises:
        SMPUsageError: a module is divided on one rank, and not, or not like that, on another.
        SMPPeerError: a rank has not called this within the timeout of the process group.
    """
    mine = {
        name: f"{type(module).__name__}({module.extra_repr()})"
        for name, module in root.named_modules()
        if isinstance(module, DistributedModule)
    }
    group = state.groups.of("tp")
    of_ranks = gathered("smp.DistributedModel", mine, group, "the tensor-parallel group")
    first, *ranks = state.topology.members("tp")
    for rank, other in zip(ranks, of_ranks[1:], strict=True):
        for name in {**of_ranks[0], **other}:
            there, here = (found.get(name, "not divided") for found in (of_ranks[0], other))
            if there != here:
                raise SMPUsageError(
                    f"all ranks have to divide the same modules: {name!r} is {there} on rank "
                    f"{first} of the job, and {here} on rank {rank}"
                )


def _candidates(
    module: nn.Module, parent: nn.Module | None = None, name: str = "", prefix: str = ""
) -> Iterator[tuple[nn.Module | None, str, str, nn.Module]]:
    """Yields parent, name in the parent, full name and module of the outermost supported ones."""
    if isinstance(module, DistributedModule):
        return
    full = f"{prefix}.{name}" if prefix else name
    if mark_of(module) is not None and registration_of(module) is not None:
        yield parent, name, full, module
        return
    # Not named_children, which leaves out the second name of a module that has two.
    for child_name, child in module._modules.items():
        if child is not None:
            yield from _candidates(child, module, child_name, full)


def _holders(root: nn.Module) -> dict[int, list[nn.Module]]:
    """Returns the modules that have each parameter as an attribute, by its id."""
    found: dict[int, list[nn.Module]] = {}
    for module in root.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                found.setdefault(id(parameter), []).append(module)
    return found


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
    stays = f"module {name!r} ({kind}) is not divided over tensor-parallel ranks"
    inside = {id(part) for part in module.modules()}
    for own, parameter in module.named_parameters():
        if any(id(holder) not in inside for holder in holders[id(parameter)]):
            say(f"{stays}: it shares its parameter {own!r} with another module")
            return module
    registration = plan.get(id(module)) or registration_of(module)
    options = mark_of(module)
    assert registration is not None
    assert options is not None
    args, kwargs = arguments_of(module, root)
    if registration.init_hook is not None:
        args, kwargs = registration.init_hook(*args, **kwargs)
    known = inspect.signature(registration.dist_module).parameters
    unknown.difference_update(known)
    kwargs = {**kwargs, **{key: value for key, value in options.items() if key in known}}
    try:
        with _settings_of(module):
            result: nn.Module = registration.dist_module(*args, **kwargs)
    except SMPUsageError as error:
        say(f"{stays}: {error}")
        return module
    if not any(isinstance(part, DistributedModule) for part in result.modules()):
        raise SMPUsageError(
            f"smp.tp_register: {type(result).__name__}, which takes the place of module {name!r} "
            f"({kind}), has no smp.nn.DistributedModule in it, so nothing would be divided: "
            "inherit from smp.nn.DistributedModule, or use modules such as smp.nn.DistributedLinear"
        )
    if state.cfg._match_weights and isinstance(result, DistributedModule):
        if registration.weights is None:
            result.match(module)
        else:
            result.load_whole(registration.weights(module))
    if registration.translations is not None:
        state.module_manager.translate_functions.append(registration.translations(name))
    # Hooks of torch, not a module around it: the names of its parameters stay its own.
    translate, translate_result = registration.forward_hook, registration.return_hook
    if translate is not None:
        result.register_forward_pre_hook(
            lambda _, args, kwargs: _plain(translate(*args, **kwargs)), with_kwargs=True
        )
    if translate_result is not None:
        result.register_forward_hook(lambda _, __, found: translate_result(found))
    result.train(module.training)
    return result


def _plain(arguments: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns what a hook has returned, an iterable and a dict, as torch wants it."""
    args, kwargs = arguments
    return tuple(args), dict(kwargs)


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
