"""`import smdistributed.modelparallel.torch as smp`."""

from typing import Any

import smdistributed.modelparallel.torch.step  # noqa: F401
from smddp.modelparallel import *  # noqa: F403
from smddp.modelparallel import step as _decorator
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

# Names of the original library that this version does not have, and what to do about it.
_LATER = {
    "set_activation_checkpointing": "call the module by patches.checkpoint.checkpoint instead",
}


def __getattr__(name: str) -> Any:
    advice = f", in this version: {_LATER[name]}" if name in _LATER else ""
    raise AttributeError(f"smp has no {name!r}{advice}", name=name)
