"""BERT. Releases of the original library use different names for the same function."""

from smddp.modelparallel.compatibility.utils import (
    same_state_dict as translate_hf_state_dict_to_smdistributed_bert,
)
from smddp.modelparallel.compatibility.utils import (
    same_state_dict as translate_state_dict_to_hf_bert,
)

__all__ = [
    "translate_hf_state_dict_to_smdistributed_bert",
    "translate_state_dict_to_hf_bert",
]
