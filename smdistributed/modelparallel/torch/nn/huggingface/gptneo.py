"""GPT-Neo. Releases of the original library use different names for the same function."""

from smddp.modelparallel.torch.tensor.huggingface.gptneo import (
    translate_hf_state_dict_to_smdistributed_gptneo,
    translate_state_dict_to_hf_gptneo,
)

__all__ = [
    "translate_hf_state_dict_to_smdistributed_gptneo",
    "translate_state_dict_to_hf_gptneo",
]
