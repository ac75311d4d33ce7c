"""Every import line of scripts and launchers, and what importing must not do."""

from __future__ import annotations

import base64
import hashlib
import importlib
import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import textwrap
import warnings
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

from smddp.modelparallel.core import errors
from smddp.modelparallel.core.errors import SMPInitializationError

ROOT = Path(__file__).resolve().parents[3]

NAMES = {
    "smdistributed.modelparallel": ["__version__"],
    "smdistributed.modelparallel.torch": [
        "init is_initialized shutdown state step StepOutput DistributedModel DistributedOptimizer",
        "partition set_partition set_activation_checkpointing model_creation is_tracing amp",
        "delay_param_initialization delayed_parameter_initialization",
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
    "smdistributed.modelparallel.torch.nn.huggingface.gpt2": [
        "translate_state_dict_to_hf_gpt2 translate_hf_state_dict_to_smdistributed_gpt2",
        "translate_hf_state_dict_to_smdistributed",
    ],
    "smdistributed.modelparallel.torch.nn.huggingface.bert": [
        "translate_state_dict_to_hf_bert translate_hf_state_dict_to_smdistributed_bert"
    ],
    "smdistributed.modelparallel.torch.nn.huggingface.roberta": [
        "translate_state_dict_to_hf_roberta translate_hf_state_dict_to_smdistributed_roberta",
        "translate_state_dict_to_smdistributed",
    ],
    "smdistributed.modelparallel.torch.nn.huggingface.gptj": [
        "translate_state_dict_to_hf_gptj translate_hf_gptj_state_dict_to_smdistributed_gptj",
        "translate_hf_gptj_state_dict_to_smdistributed",
        "translate_hf_state_dict_to_smdistributed_gptj",
    ],
    "smdistributed.modelparallel.torch.nn.huggingface.gptneo": [
        "translate_state_dict_to_hf_gptneo translate_hf_state_dict_to_smdistributed_gptneo"
    ],
    "smdistributed.modelparallel.torch.exceptions": ["SMPUsageError SMPMicrobatchError"],
    "smdistributed.modelparallel.backend.exceptions": ["SMPInitializationError SMPPeerError"],
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


def test_every_error_is_there_and_documented() -> None:
    smp = importlib.import_module("smdistributed.modelparallel.torch")
    root = Path(__file__).resolve().parents[3]
    guide = (root / "docs" / "model-parallel-reference.md").read_text()
    for name in errors.__all__:
        assert getattr(smp, name) is getattr(errors, name)
        assert f"| `{name}` |" in guide


def test_modules_that_are_made_where_tensor_parallelism_is_off_stay_what_they_are() -> None:
    smp = importlib.import_module("smdistributed.modelparallel.torch")

    @smp.tp_register(smp.nn.DistributedLinear)
    class Registered(nn.Linear):
        pass

    smp.tp_register_with_module(nn.Embedding, smp.nn.DistributedEmbedding)
    torch.manual_seed(1)
    with warnings.catch_warnings(), smp.tensor_parallelism(enabled=False, zero_init=True):
        warnings.simplefilter("error")
        with smp.delay_param_initialization(enabled=False):
            inside = Registered(3, 3)
        smp.set_tensor_parallelism(inside, False)
    torch.manual_seed(1)
    assert type(inside) is Registered
    assert torch.equal(inside.weight, nn.Linear(3, 3).weight)
    assert not isinstance(inside, smp.nn.DistributedModule)


def test_modules_that_are_divided() -> None:
    from smdistributed.modelparallel.torch import nn as smp_nn

    names = [name for name in smp_nn.__all__ if name.startswith("Distributed")]
    assert len(names) == 8
    for name in names:
        assert issubclass(getattr(smp_nn, name), smp_nn.DistributedModule)
    with pytest.raises(SMPInitializationError, match=r"call smp.init\(\) first"):
        smp_nn.DistributedTransformerLayer()
    assert not hasattr(smp_nn, "Nonsense")


def test_version_selects_the_newer_checkpoint_interface() -> None:
    import smdistributed.modelparallel

    numbers = [int(part) for part in smdistributed.modelparallel.__version__.split(".")]
    assert numbers >= [1, 10]
    assert importlib.util.find_spec("smdistributed") is not None


def test_wheels_have_metadata_of_the_old_name(tmp_path: Path) -> None:
    """Some programs ask importlib.metadata whether there is a distribution `smdistributed`."""
    command = ["-q", "egg_info", "--egg-base", str(tmp_path), "build_py", "--build-lib"]
    built = tmp_path / "built"
    subprocess.run(
        [sys.executable, "setup.py", *command, str(built)],
        cwd=Path(__file__).resolve().parents[3],
        check=True,
        capture_output=True,
    )
    (found,) = importlib.metadata.distributions(name="smdistributed", path=[str(built)])
    assert re.match(r"\d+\.\d+", found.version)
    assert (built / "smdistributed" / "modelparallel" / "torch" / "nn" / "huggingface").is_dir()


def test_development_installs_have_it_too(tmp_path: Path) -> None:
    """With a package that has no compiled part, so that nothing is built."""
    (tmp_path / "made_up.py").touch()
    script = f"""
        import distutils.core, os, sys
        from setuptools import Distribution

        os.chdir({str(ROOT)!r})
        ours = distutils.core.run_setup("setup.py", ["-q", "egg_info"], stop_after="init")
        os.chdir({str(tmp_path)!r})
        made_up = Distribution(dict(name="smddp", version="3.4", py_modules=["made_up"]))
        made_up.cmdclass["editable_wheel"] = ours.cmdclass["editable_wheel"]
        made_up.script_name = "setup.py"
        command = made_up.get_command_obj("editable_wheel")
        command.dist_dir = "."
        made_up.run_command("editable_wheel")
    """
    command = [sys.executable, "-c", "import setuptools\n" + textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as files:
        assert files.testzip() is None
        files.extractall(installed)
    (found,) = importlib.metadata.distributions(name="smdistributed", path=[str(installed)])
    assert found.version == "3.4"
    # Each file is listed with its hash, so that it goes when smddp is uninstalled.
    (smddp,) = importlib.metadata.distributions(name="smddp", path=[str(installed)])
    assert smddp.files is not None
    (listed,) = [file for file in smddp.files if file.parts[0] == "smdistributed.egg-info"]
    digest = hashlib.sha256(Path(str(listed.locate())).read_bytes()).digest()
    assert listed.hash is not None
    assert listed.hash.value == base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


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
