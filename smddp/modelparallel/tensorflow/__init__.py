"""Model parallelism for TensorFlow and Keras; scripts import it under its original name.

    import smdistributed.modelparallel.tensorflow as smp

    smp.init({"partitions": 2, "microbatches": 2})

    class MyModel(smp.DistributedModel): ...

    @smp.step
    def forward_backward(images, labels):
        predictions = model(images, training=True)
        loss = loss_object(labels, predictions)
        return optimizer.get_gradients(loss, model.trainable_variables), loss

    gradients, loss = forward_backward(images, labels)
    gradients = [gradient.accumulate() for gradient in gradients]
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))

It does not import torch.
"""

from tensorflow.train import Checkpoint

from smddp.modelparallel.core.errors import (
    SMPConfigurationError,
    SMPError,
    SMPInitializationError,
    SMPMicrobatchError,
    SMPPartitionError,
    SMPPeerError,
    SMPUsageError,
)
from smddp.modelparallel.core.topology import CommGroup, RankType
from smddp.modelparallel.tensorflow.checkpoint import CheckpointManager
from smddp.modelparallel.tensorflow.gradients import install as _install
from smddp.modelparallel.tensorflow.job import (
    allgather,
    barrier,
    broadcast,
    dp_barrier,
    dp_rank,
    dp_size,
    get_dp_group,
    get_mp_group,
    get_pp_group,
    get_rdp_group,
    get_tp_group,
    get_world_group,
    init,
    instance_id,
    is_initialized,
    local_rank,
    local_size,
    mp_barrier,
    mp_rank,
    mp_size,
    pp_barrier,
    pp_rank,
    pp_size,
    rank,
    rdp_barrier,
    rdp_rank,
    rdp_size,
    recv_from,
    send,
    shutdown,
    size,
    tp_barrier,
    tp_rank,
    tp_size,
)
from smddp.modelparallel.tensorflow.layers import partition
from smddp.modelparallel.tensorflow.model import DistributedModel, register_post_partition_hook
from smddp.modelparallel.tensorflow.step import StepOutput, step

WORLD, MP_GROUP, DP_GROUP = CommGroup.WORLD, CommGroup.MP_GROUP, CommGroup.DP_GROUP
TP_GROUP, PP_GROUP, RDP_GROUP = CommGroup.TP_GROUP, CommGroup.PP_GROUP, CommGroup.RDP_GROUP
WORLD_RANK, MP_RANK, DP_RANK = RankType.WORLD_RANK, RankType.MP_RANK, RankType.DP_RANK
TP_RANK, PP_RANK, RDP_RANK = RankType.TP_RANK, RankType.PP_RANK, RankType.RDP_RANK

_install()

__all__ = [
    "DP_GROUP",
    "DP_RANK",
    "MP_GROUP",
    "MP_RANK",
    "PP_GROUP",
    "PP_RANK",
    "RDP_GROUP",
    "RDP_RANK",
    "TP_GROUP",
    "TP_RANK",
    "WORLD",
    "WORLD_RANK",
    "Checkpoint",
    "CheckpointManager",
    "CommGroup",
    "DistributedModel",
    "RankType",
    "SMPConfigurationError",
    "SMPError",
    "SMPInitializationError",
    "SMPMicrobatchError",
    "SMPPartitionError",
    "SMPPeerError",
    "SMPUsageError",
    "StepOutput",
    "allgather",
    "barrier",
    "broadcast",
    "dp_barrier",
    "dp_rank",
    "dp_size",
    "get_dp_group",
    "get_mp_group",
    "get_pp_group",
    "get_rdp_group",
    "get_tp_group",
    "get_world_group",
    "init",
    "instance_id",
    "is_initialized",
    "local_rank",
    "local_size",
    "mp_barrier",
    "mp_rank",
    "mp_size",
    "partition",
    "pp_barrier",
    "pp_rank",
    "pp_size",
    "rank",
    "rdp_barrier",
    "rdp_rank",
    "rdp_size",
    "recv_from",
    "register_post_partition_hook",
    "send",
    "shutdown",
    "size",
    "step",
    "tp_barrier",
    "tp_rank",
    "tp_size",
]
