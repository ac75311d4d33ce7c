"""RoBERTa."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smddp.modelparallel.tensor.huggingface.encoders import TRANSLATION, hooks
from smddp.modelparallel.tensor.huggingface.hooks import Architecture

__all__ = [
    "ARCHITECTURE",
    "translate_hf_state_dict_to_smdistributed_roberta",
    "translate_state_dict_to_hf_roberta",
]


def translate_state_dict_to_hf_roberta(
    state_dict: Mapping[str, Any], max_seq_len: int | None = None
) -> dict[str, Any]:
    """Returns Hugging Face's state dict for that of a model with a divided encoder.

    Args:
        state_dict: with whole tensors.
        max_seq_len: accepted; RoBERTa has no buffers of causal masks.
    """
    return TRANSLATION.to_hf(state_dict)


def translate_hf_state_dict_to_smdistributed_roberta(
    state_dict: Mapping[str, Any], max_seq_len: int | None = None
) -> dict[str, Any]:
    """Returns the state dict of a model with a divided encoder for Hugging Face's.

    Args:
        state_dict: of any model with a RoBERTa encoder.
        max_seq_len: accepted.
    """
    return TRANSLATION.to_smp(state_dict)


ARCHITECTURE = Architecture(
    (hooks("transformers.models.roberta.modeling_roberta", "RobertaEncoder"),),
    translate_state_dict_to_hf_roberta,
    translate_hf_state_dict_to_smdistributed_roberta,
)
