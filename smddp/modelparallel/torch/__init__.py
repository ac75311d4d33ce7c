"""Model parallelism: trains a model that is divided over ranks, with `@smp.step`.

Scripts import it under its original name, `import smdistributed.modelparallel.torch as smp`.
"""

from __future__ import annotations

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
from smddp.modelparallel.torch.api.activations import set_activation_checkpointing
from smddp.modelparallel.torch.api.generation import generate
from smddp.modelparallel.torch.api.memory import MemoryReport, memory
from smddp.modelparallel.torch.api.messaging import (
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
from smddp.modelparallel.torch.api.ranks import (
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
from smddp.modelparallel.torch.api.report import StepReport, explain, timeline
from smddp.modelparallel.torch.api.step import StepOutput, step
from smddp.modelparallel.torch.checkpoint.checkpoint import (
    load,
    resume_from_checkpoint,
    save,
    save_checkpoint,
)
from smddp.modelparallel.torch.delayed.context import (
    delay_param_initialization,
    delayed_parameter_initialization,
)
from smddp.modelparallel.torch.job.init import init, is_initialized, shutdown
from smddp.modelparallel.torch.job.state import state
from smddp.modelparallel.torch.model.creation import model_creation
from smddp.modelparallel.torch.model.distributed_model import DistributedModel
from smddp.modelparallel.torch.optimizer import amp
from smddp.modelparallel.torch.optimizer.clipping import clip_grad_norm
from smddp.modelparallel.torch.optimizer.distributed_optimizer import DistributedOptimizer
from smddp.modelparallel.torch.partition.context import partition, set_partition
from smddp.modelparallel.torch.partition.trace import is_tracing
from smddp.modelparallel.torch.tensor.huggingface import architectures as _architectures
from smddp.modelparallel.torch.tensor.huggingface import plan as _plan
from smddp.modelparallel.torch.tensor.marks import set_tensor_parallelism, tensor_parallelism
from smddp.modelparallel.torch.tensor.registry import add_finder as _add_finder
from smddp.modelparallel.torch.tensor.registry import add_planner as _add_planner
from smddp.modelparallel.torch.tensor.registry import tp_register, tp_register_with_module

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
