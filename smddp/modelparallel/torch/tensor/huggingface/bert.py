"""BERT."""

from __future__ import annotations

from smddp.modelparallel.torch.tensor.huggingface.encoders import hooks, to_hf, to_smp
from smddp.modelparallel.torch.tensor.huggingface.hooks import Architecture

__all__ = [
    "ARCHITECTURE",
    "translate_hf_state_dict_to_smdistributed_bert",
    "translate_state_dict_to_hf_bert",
]


translate_state_dict_to_hf_bert = to_hf
translate_hf_state_dict_to_smdistributed_bert = to_smp

ARCHITECTURE = Architecture(
    hooks("transformers.models.bert.modeling_bert", "BertEncoder", "BertLayer"),
    translate_state_dict_to_hf_bert,
    translate_hf_state_dict_to_smdistributed_bert,
)
