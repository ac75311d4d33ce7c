"""BERT; releases of the original library have different names for one function."""

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
