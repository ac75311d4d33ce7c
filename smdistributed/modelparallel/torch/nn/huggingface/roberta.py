"""RoBERTa. Releases of the original library use different names for the same function."""

from smddp.modelparallel.torch.tensor.huggingface.roberta import (
    translate_hf_state_dict_to_smdistributed_roberta,
    translate_state_dict_to_hf_roberta,
)
from smddp.modelparallel.torch.tensor.huggingface.roberta import (
    translate_hf_state_dict_to_smdistributed_roberta as translate_state_dict_to_smdistributed,
)

__all__ = [
    "translate_hf_state_dict_to_smdistributed_roberta",
    "translate_state_dict_to_hf_roberta",
    "translate_state_dict_to_smdistributed",
]
