"""GPT-Neo; releases of the original library have different names for one function."""

from smddp.modelparallel.compatibility.utils import (
    same_state_dict as translate_hf_state_dict_to_smdistributed_gptneo,
)
from smddp.modelparallel.compatibility.utils import (
    same_state_dict as translate_state_dict_to_hf_gptneo,
)

__all__ = [
    "translate_hf_state_dict_to_smdistributed_gptneo",
    "translate_state_dict_to_hf_gptneo",
]
