"""Every import line of scripts and launchers, and what importing must not do."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys

import pytest

from smddp.modelparallel.errors import SMPUsageError

NAMES = {
    "smdistributed.modelparallel": ["__version__"],
    "smdistributed.modelparallel.torch": [
        "init is_initialized shutdown state step StepOutput DistributedModel DistributedOptimizer",
        "partition set_partition model_creation is_tracing amp",
        "save load save_checkpoint resume_from_checkpoint",
        "rank size local_rank local_size instance_id pp_rank pp_size tp_rank tp_size rdp_rank",
        "rdp_size mp_rank mp_size dp_rank dp_size get_mp_group get_dp_group get_tp_group",
        "get_pp_group get_rdp_group get_world_group get_world_process_group get_mp_process_group",
        "get_dp_process_group get_tp_process_group get_pp_process_group get_rdp_process_group",
        "send recv_from broadcast allgather barrier dp_barrier mp_barrier pp_barrier tp_barrier",
        "rdp_barrier CommGroup RankType WORLD MP_GROUP DP_GROUP TP_GROUP PP_GROUP RDP_GROUP",
        "WORLD_RANK MP_RANK DP_RANK TP_RANK PP_RANK RDP_RANK model utils explain timeline",
        "nn optimizers patches sharded_data_parallel_checkpoint",
    ],
    "smdistributed.modelparallel.torch.model": ["DistributedModel"],
    "smdistributed.modelparallel.torch.step": ["step StepOutput"],
    "smdistributed.modelparallel.torch.state_mod": ["state"],
    "smdistributed.modelparallel.torch.amp": ["GradScaler"],
    "smdistributed.modelparallel.torch.utils": ["rmsg get_distribution_axis"],
    "smdistributed.modelparallel.torch.nn": ["FusedLayerNorm"],
    "smdistributed.modelparallel.torch.optimizers": ["FusedLAMB FusedLamb FusedNovoGrad FusedAdam"],
    "smdistributed.modelparallel.torch.patches.checkpoint": ["checkpoint checkpoint_sequential"],
    "smdistributed.modelparallel.test.torch.utils": ["dump_model verify"],
    "smdistributed.modelparallel.torch.sharded_data_parallel_checkpoint": [
        "get_full_state_dict_from_sharded_data_parallel_checkpoint"
    ],
}


@pytest.mark.parametrize("module", NAMES)
def test_names(module: str) -> None:
    found = importlib.import_module(module)
    for name in " ".join(NAMES[module]).split():
        assert hasattr(found, name), name


def test_modules_of_tensor_parallelism_say_that_they_are_missing() -> None:
    nn = importlib.import_module("smdistributed.modelparallel.torch.nn")
    with pytest.raises(SMPUsageError, match="DistributedTransformer belongs to tensor parallelism"):
        _ = nn.DistributedTransformer
    assert not hasattr(nn, "Nonsense")


def test_version_selects_the_newer_checkpoint_interface() -> None:
    import smdistributed.modelparallel

    numbers = [int(part) for part in smdistributed.modelparallel.__version__.split(".")]
    assert numbers >= [1, 10]
    assert importlib.util.find_spec("smdistributed") is not None


def test_the_name_step_is_the_decorator_whatever_is_imported_first() -> None:
    code = (
        "import smdistributed.modelparallel.torch.step, smdistributed.modelparallel.torch as smp\n"
        "from smdistributed.modelparallel.torch.step import step\n"
        "assert smp.step is step and callable(step)\n"
        "assert smp.state.initialized is False and not smp.is_initialized()\n"
        "import torch\n"
        "assert not torch.distributed.is_initialized() and not torch.cuda.is_initialized()\n"
        "assert smp.utils.rmsg('x') == '[?] x'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "module",
    [
        "smdistributed.modelparallel.torch.exceptions",
        "smdistributed.modelparallel.backend.exceptions",
    ],
)
def test_launchers_find_long_names(module: str) -> None:
    found = importlib.import_module(module)
    classes = [name for name in dir(found) if isinstance(getattr(found, name), type)]
    assert classes
    for name in classes:
        assert name.startswith("SMP"), name
        assert issubclass(getattr(found, name), Exception)
