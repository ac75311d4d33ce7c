"""BERT. Releases of the original library use different names for the same function."""

from smddp.modelparallel.torch.tensor.huggingface.bert import (
    translate_hf_state_dict_to_smdistributed_bert,
    translate_state_dict_to_hf_bert,
)

__all__ = [
    "translate_hf_state_dict_to_smdistributed_bert",
    "translate_state_dict_to_hf_bert",
]
