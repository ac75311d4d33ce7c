"""Makes one state dict of a checkpoint in parts, in a single process."""

from smddp.modelparallel.torch.checkpoint.checkpoint import (
    full_state_dict as get_full_state_dict_from_sharded_data_parallel_checkpoint,
)

__all__ = ["get_full_state_dict_from_sharded_data_parallel_checkpoint"]
