"""Model parallelism: trains a model that is divided over ranks, with `@smp.step`.

Scripts import it under its original name, `import smdistributed.modelparallel.torch as smp`.
"""

from __future__ import annotations

from smddp.modelparallel.api.activations import set_activation_checkpointing
from smddp.modelparallel.api.generation import generate
from smddp.modelparallel.api.memory import MemoryReport, memory
from smddp.modelparallel.api.messaging import (
    allgather,
    barrier,
    broadcast,
    dp_barrier,
    mp_barrier,
    pp_barrier,
    rdp_barrier,
    recv_from,
    send,
    tp_barrier,
)
from smddp.modelparallel.api.ranks import (
    dp_rank,
    dp_size,
    get_dp_group,
    get_dp_process_group,
    get_mp_group,
    get_mp_process_group,
    get_pp_group,
    get_pp_process_group,
    get_rdp_group,
    get_rdp_process_group,
    get_tp_group,
    get_tp_process_group,
    get_world_group,
    get_world_process_group,
    instance_id,
    local_rank,
    local_size,
    mp_rank,
    mp_size,
    pp_rank,
    pp_size,
    rank,
    rdp_rank,
    rdp_size,
    size,
    tp_rank,
    tp_size,
)
from smddp.modelparallel.api.report import StepReport, explain, timeline
from smddp.modelparallel.api.step import StepOutput, step
from smddp.modelparallel.checkpoint.checkpoint import (
    load,
    resume_from_checkpoint,
    save,
    save_checkpoint,
)
from smddp.modelparallel.delayed.context import (
    delay_param_initialization,
    delayed_parameter_initialization,
)
from smddp.modelparallel.job.init import init, is_initialized, shutdown
from smddp.modelparallel.job.state import state
from smddp.modelparallel.model.creation import model_creation
from smddp.modelparallel.model.distributed_model import DistributedModel
from smddp.modelparallel.optimizer import amp
from smddp.modelparallel.optimizer.clipping import clip_grad_norm
from smddp.modelparallel.optimizer.distributed_optimizer import DistributedOptimizer
from smddp.modelparallel.partition.context import partition, set_partition
from smddp.modelparallel.partition.trace import is_tracing
from smddp.modelparallel.tensor.huggingface import architectures as _architectures
from smddp.modelparallel.tensor.huggingface import plan as _plan
from smddp.modelparallel.tensor.marks import set_tensor_parallelism, tensor_parallelism
from smddp.modelparallel.tensor.registry import add_finder as _add_finder
from smddp.modelparallel.tensor.registry import add_planner as _add_planner
from smddp.modelparallel.tensor.registry import tp_register, tp_register_with_module
from smddp_smp.errors import (
    SMPConfigurationError,
    SMPError,
    SMPInitializationError,
    SMPMicrobatchError,
    SMPPartitionError,
    SMPPeerError,
    SMPUsageError,
)
from smddp_smp.topology import CommGroup, RankType

WORLD, MP_GROUP, DP_GROUP = CommGroup.WORLD, CommGroup.MP_GROUP, CommGroup.DP_GROUP
TP_GROUP, PP_GROUP, RDP_GROUP = CommGroup.TP_GROUP, CommGroup.PP_GROUP, CommGroup.RDP_GROUP
WORLD_RANK, MP_RANK, DP_RANK = RankType.WORLD_RANK, RankType.MP_RANK, RankType.DP_RANK
TP_RANK, PP_RANK, RDP_RANK = RankType.TP_RANK, RankType.PP_RANK, RankType.RDP_RANK

_add_finder(_architectures.registration)
_add_planner(_plan.planned)

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
    "CommGroup",
    "DistributedModel",
    "DistributedOptimizer",
    "MemoryReport",
    "RankType",
    "SMPConfigurationError",
    "SMPError",
    "SMPInitializationError",
    "SMPMicrobatchError",
    "SMPPartitionError",
    "SMPPeerError",
    "SMPUsageError",
    "StepOutput",
    "StepReport",
    "allgather",
    "amp",
    "barrier",
    "broadcast",
    "clip_grad_norm",
    "delay_param_initialization",
    "delayed_parameter_initialization",
    "dp_barrier",
    "dp_rank",
    "dp_size",
    "explain",
    "generate",
    "get_dp_group",
    "get_dp_process_group",
    "get_mp_group",
    "get_mp_process_group",
    "get_pp_group",
    "get_pp_process_group",
    "get_rdp_group",
    "get_rdp_process_group",
    "get_tp_group",
    "get_tp_process_group",
    "get_world_group",
    "get_world_process_group",
    "init",
    "instance_id",
    "is_initialized",
    "is_tracing",
    "load",
    "local_rank",
    "local_size",
    "memory",
    "model_creation",
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
    "resume_from_checkpoint",
    "save",
    "save_checkpoint",
    "send",
    "set_activation_checkpointing",
    "set_partition",
    "set_tensor_parallelism",
    "shutdown",
    "size",
    "state",
    "step",
    "tensor_parallelism",
    "timeline",
    "tp_barrier",
    "tp_rank",
    "tp_register",
    "tp_register_with_module",
    "tp_size",
]
