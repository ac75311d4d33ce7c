"""GPT-2. Releases of the original library use different names for the same function."""

from smddp.modelparallel.torch.tensor.huggingface.gpt2 import (
    translate_hf_state_dict_to_smdistributed_gpt2,
    translate_state_dict_to_hf_gpt2,
)
from smddp.modelparallel.torch.tensor.huggingface.gpt2 import (
    translate_hf_state_dict_to_smdistributed_gpt2 as translate_hf_state_dict_to_smdistributed,
)

__all__ = [
    "translate_hf_state_dict_to_smdistributed",
    "translate_hf_state_dict_to_smdistributed_gpt2",
    "translate_state_dict_to_hf_gpt2",
]
