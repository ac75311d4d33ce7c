"""`import smdistributed.modelparallel.torch as smp`."""

import smdistributed.modelparallel.torch.step  # noqa: F401
from smddp.modelparallel.torch import *  # noqa: F403
from smddp.modelparallel.torch import step as _decorator
from smdistributed.modelparallel.torch import (
    exceptions,
    model,
    nn,
    optimizers,
    patches,
    sharded_data_parallel_checkpoint,
    state_mod,
    utils,
)
from smdistributed.modelparallel.torch.patches import checkpoint as _patch  # noqa: F401

# Scripts expect the decorator under the name of the module that it is in.
step = _decorator

__all__ = [
    "exceptions",
    "model",
    "nn",
    "optimizers",
    "patches",
    "sharded_data_parallel_checkpoint",
    "state_mod",
    "step",
    "utils",
]
