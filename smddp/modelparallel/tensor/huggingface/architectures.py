"""All architectures that are divided without a call of `smp.tp_register`."""

from __future__ import annotations

from smddp.modelparallel.tensor.huggingface import bert, gpt2, gptj, gptneo, roberta
from smddp.modelparallel.tensor.huggingface.hooks import Architecture, Hooks

__all__ = ["ARCHITECTURES", "find"]

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
