"""Data parallelism for TensorFlow and Keras; scripts import it under its original name.

    import smdistributed.dataparallel.tensorflow as sdp

    sdp.init()
    with tf.GradientTape() as tape:
        loss = loss_object(labels, model(images, training=True))
    tape = sdp.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    if first_batch:
        sdp.broadcast_variables(model.variables, root_rank=0)
        sdp.broadcast_variables(optimizer.variables, root_rank=0)

It imports neither torch nor the package smddp.
"""

import tensorflow as _tf

from smddp.tensorflow.callbacks import (
    AverageMetrics,
    BroadcastGlobalVariablesHook,
    BroadcastVariables,
    broadcast_global_variables,
    shard,
)
from smddp.tensorflow.callbacks import install_backups as _install_backups
from smddp.tensorflow.collectives import (
    Compression,
    ReduceOp,
    allgather,
    allreduce,
    broadcast,
    broadcast_variables,
    oob_allreduce,
    overlap,
)
from smddp.tensorflow.gradients import DistributedGradientTape, DistributedOptimizer
from smddp.tensorflow.job import init, is_initialized, local_rank, local_size, rank, shutdown, size
from smddp.tensorflow.normalization import install as _install
from smddp.tensorflow.versions import check as _check

_check(_tf.version.VERSION)
_install()
_install_backups()

__all__ = [
    "AverageMetrics",
    "BroadcastGlobalVariablesHook",
    "BroadcastVariables",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "ReduceOp",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_variables",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "oob_allreduce",
    "overlap",
    "rank",
    "shard",
    "shutdown",
    "size",
]
