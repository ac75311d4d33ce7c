"""All architectures that are divided without a call of `smp.tp_register`."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from torch import nn

from smddp.modelparallel.core.errors import SMPUsageError
from smddp.modelparallel.torch.tensor.huggingface import bert, gpt2, gptj, gptneo, roberta
from smddp.modelparallel.torch.tensor.huggingface.hooks import Architecture, Hooks
from smddp.modelparallel.torch.tensor.registry import Registration

__all__ = ["ARCHITECTURES", "find", "registration"]

ARCHITECTURES: dict[str, Architecture] = {
    "gpt2": gpt2.ARCHITECTURE,
    "bert": bert.ARCHITECTURE,
    "roberta": roberta.ARCHITECTURE,
    "gptj": gptj.ARCHITECTURE,
    "gptneo": gptneo.ARCHITECTURE,
}


def find(module_cls: type) -> tuple[Architecture, Hooks] | None:
    """Returns what is known of a class; None if it is none of transformers that can be divided.

    It goes by the name of the class, so transformers is not imported for it.
    """
    for architecture in ARCHITECTURES.values():
        for hooks in architecture.hooks:
            if (module_cls.__module__, module_cls.__name__) == (hooks.module, hooks.name):
                return architecture, hooks
    return None


def registration(module_cls: type) -> tuple[Registration, Any] | None:
    """Returns what takes the place of a class, for `registry.add_finder`."""
    found = find(module_cls)
    if found is None:
        return None
    architecture, hooks = found
    _, dist_module, init, forward, returned = hooks.arguments()
    translations = functools.partial(architecture.translations, hooks)
    arguments = functools.partial(_arguments, hooks)
    return Registration(dist_module, init, forward, returned, translations), arguments


def _arguments(hooks: Hooks, module: nn.Module, root: nn.Module) -> dict[str, Any]:
    """Returns the arguments with which a module, in a model, was made."""
    around = [one for one in root.modules() if any(part is module for part in one.modules())]
    # A layer of an old release does not keep the configuration, nor does a part of it. So the
    # innermost model around it counts.
    config = _attribute((*module.modules(), *reversed(around)), "config")
    if config is None:
        raise SMPUsageError(
            f"a {hooks.name} that does not belong to a model of transformers does not keep its "
            "configuration in this release, so it cannot be divided"
        )
    if not hooks.of_layer:
        return {"config": config}
    return {"config": config, "layer_idx": _attribute(module.modules(), "layer_idx", "layer_id")}


def _attribute(modules: Iterable[nn.Module], *names: str) -> Any:
    """Returns the first such attribute of the modules; None if there is none."""
    found = (getattr(module, name, None) for module in modules for name in names)
    return next((value for value in found if value is not None), None)
