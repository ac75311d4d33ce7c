"""All architectures that are divided without a call of `smp.tp_register`."""

from __future__ import annotations

from smddp.modelparallel.tensor.huggingface import bert, gpt2, gptj, gptneo, roberta
from smddp.modelparallel.tensor.huggingface.hooks import Architecture

__all__ = ["ARCHITECTURES"]

ARCHITECTURES: dict[str, Architecture] = {
    "gpt2": gpt2.ARCHITECTURE,
    "bert": bert.ARCHITECTURE,
    "roberta": roberta.ARCHITECTURE,
    "gptj": gptj.ARCHITECTURE,
    "gptneo": gptneo.ARCHITECTURE,
}
