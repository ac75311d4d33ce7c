"""RoBERTa."""

from __future__ import annotations

from smddp.modelparallel.torch.tensor.huggingface.encoders import hooks, to_hf, to_smp
from smddp.modelparallel.torch.tensor.huggingface.hooks import Architecture

__all__ = [
    "ARCHITECTURE",
    "translate_hf_state_dict_to_smdistributed_roberta",
    "translate_state_dict_to_hf_roberta",
]


translate_state_dict_to_hf_roberta = to_hf
translate_hf_state_dict_to_smdistributed_roberta = to_smp

ARCHITECTURE = Architecture(
    hooks("transformers.models.roberta.modeling_roberta", "RobertaEncoder", "RobertaLayer"),
    translate_state_dict_to_hf_roberta,
    translate_hf_state_dict_to_smdistributed_roberta,
)
