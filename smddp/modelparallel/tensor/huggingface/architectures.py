"""All architectures that are divided without a call of `smp.tp_register`."""

from __future__ import annotations

import functools
from typing import Any

from smddp.modelparallel.tensor.huggingface import bert, gpt2, gptj, gptneo, roberta
from smddp.modelparallel.tensor.huggingface.hooks import Architecture, Hooks
from smddp.modelparallel.tensor.registry import Registration

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
    weights = functools.partial(architecture.weights, hooks)
    translations = functools.partial(architecture.translations, hooks)
    # Every module of transformers that is divided keeps the configuration that it was made with.
    return Registration(dist_module, init, forward, returned, weights, translations), _arguments


def _arguments(module: Any) -> dict[str, Any]:
    return {"config": module.config}
