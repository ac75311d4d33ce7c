"""smddprun with the `distribution` of a SageMaker estimator: what runs, and what is refused."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import programs
import pytest

from smddp.launch import cli

DATA_PARALLEL: dict[str, Any] = {"smdistributed": {"dataparallel": {"enabled": True}}}
MPI: dict[str, Any] = {"mpi": {"enabled": True, "processes_per_host": 2}}


def model_parallel(parameters: object) -> dict[str, Any]:
    strategy = {"modelparallel": {"enabled": True, "parameters": parameters}}
    return {**MPI, "smdistributed": strategy}


def plan(
    capsys: pytest.CaptureFixture[str], distribution: object, *options: str
) -> tuple[dict[str, str], list[str], str]:
    """Returns the variables, the command and the warnings that --dry-run prints."""
    text = distribution if isinstance(distribution, str) else json.dumps(distribution)
    cli.main(["--distribution", text, *options, "--dry-run", "train.py", "--epochs", "3"])
    printed = capsys.readouterr()
    words = shlex.split(printed.out)
    first = words.index(sys.executable)
    variables = dict(word.split("=", 1) for word in words[:first])
    return variables, words[first:], printed.err


def torchrun(*options: str) -> list[str]:
    begin = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--tee", "3"]
    end = ["--max-restarts", "0", "--no-python", sys.executable, "train.py", "--epochs", "3"]
    return [*begin, "--nproc-per-node", *options, *end]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as raised:
        cli.main([*arguments, "train.py"])
    assert raised.value.code == 2
    written = capsys.readouterr()
    assert written.out == ""
    assert written.err.startswith("smddprun: ")
    assert written.err.count("\n") == 1, "one sentence"
    return written.err


@pytest.mark.parametrize("strategy", [DATA_PARALLEL, {"pytorchddp": {"enabled": True}}])
def test_data_parallel(capsys: pytest.CaptureFixture[str], strategy: dict[str, Any]) -> None:
    variables, command, said = plan(capsys, strategy, "-i", "ml.p4d.24xlarge")
    assert json.loads(variables.pop("SM_FRAMEWORK_PARAMS")) == {
        "sagemaker_distributed_dataparallel_enabled": True,
        "sagemaker_distributed_dataparallel_custom_mpi_options": "",
        "sagemaker_instance_type": "ml.p4d.24xlarge",
    }
    assert variables == {"SMDATAPARALLEL_USE_SINGLENODE": "1"}
    # A rank for each GPU; torchrun counts them.
    assert command == torchrun("auto")
    assert said == ""


def test_data_parallel_on_several_hosts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("node0 slots=8\nnode1 slots=8\n")
    variables, command, _ = plan(capsys, DATA_PARALLEL, f"--hostfile={hosts}", "--node-rank=1")
    assert variables["SMDATAPARALLEL_USE_HOMOGENEOUS"] == "1"
    assert "SMDATAPARALLEL_USE_SINGLENODE" not in variables
    options = shlex.join(command)
    assert "--nnodes 2 --node-rank 1 --master-addr node0 --master-port 29500" in options
    assert "--nproc-per-node 8 " in options


def test_custom_mpi_options(capsys: pytest.CaptureFixture[str]) -> None:
    options = "-verbose --NCCL_DEBUG WARN -x SMDDP_LOG=info -x PATH --mca btl_vader 'a b'"
    strategy = {"dataparallel": {"enabled": True, "custom_mpi_options": options}}
    variables, _, said = plan(capsys, {"smdistributed": strategy})
    assert variables["SMDDP_LOG"] == "info"
    assert variables["NCCL_DEBUG"] == "WARN"
    assert "PATH" not in variables, "the ranks inherit it"
    assert said == (
        "smddprun: ignores the options -verbose --mca btl_vader a b of mpirun: torchrun starts "
        "the ranks\n"
    )


def test_mpi(capsys: pytest.CaptureFixture[str]) -> None:
    variables, command, _ = plan(capsys, MPI)
    assert json.loads(variables.pop("SM_FRAMEWORK_PARAMS")) == {
        "sagemaker_mpi_enabled": True,
        "sagemaker_mpi_num_of_processes_per_host": 2,
        "sagemaker_mpi_custom_mpi_options": "",
    }
    assert not variables
    assert command == torchrun("2")
    assert plan(capsys, {"mpi": {"enabled": True}})[1] == torchrun("1")
    assert plan(capsys, {"mpi": {"enabled": True}}, "-n", "3")[1] == torchrun("3")


def test_torch_distributed(capsys: pytest.CaptureFixture[str]) -> None:
    strategy = {"torch_distributed": {"enabled": True}}
    variables, command, _ = plan(capsys, strategy, "-n", "3", "--instead-of", "gloo")
    assert json.loads(variables.pop("SM_FRAMEWORK_PARAMS")) == {
        "sagemaker_torch_distributed_enabled": True
    }
    assert variables == {"SMDDP_INSTEAD_OF": "gloo"}
    assert command == torchrun("3")
    assert "--node-of-rank 2+1" in shlex.join(plan(capsys, strategy, "--nodes", "2+1")[1])


def test_a_file_and_the_notation_of_a_notebook(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "distribution.json"
    file.write_text(json.dumps(MPI))
    assert plan(capsys, str(file)) == plan(capsys, MPI) == plan(capsys, repr(MPI))
    file.write_text(f"\ufeff{json.dumps(MPI)}", encoding="utf-8")  # by an editor of Windows
    assert plan(capsys, str(file)) == plan(capsys, MPI)


@pytest.mark.parametrize(
    ("distribution", "text"),
    [
        # The texts of SageMaker's SDK.
        (
            {"smdistributed": {"dataparallel": {}, "modelparallel": {}}},
            "Cannot use more than 1 smdistributed strategy. Choose one of the following supported "
            "strategies:['dataparallel', 'modelparallel']",
        ),
        (
            {"smdistributed": {"tensorparallel": {}}},
            "Invalid smdistributed strategy provided: tensorparallel Supported strategies: "
            "['dataparallel', 'modelparallel']",
        ),
        ({"smdistributed": True}, "smdistributed strategy requires a dictionary"),
        (
            {"pytorchddp": {"enabled": True}, **DATA_PARALLEL},
            "Cannot use both pytorchddp and smdistributed distribution options together.",
        ),
        (
            {"smdistributed": model_parallel({})["smdistributed"]},
            "Cannot use Model Parallelism without MPI enabled!",
        ),
        (
            {**model_parallel({}), "mpi": {"enabled": False}},
            "Cannot use Model Parallelism without MPI enabled!",
        ),
        (
            model_parallel("missing.json"),
            "Expected a string path to an existing modelparallel config, or a dictionary. "
            "Received: missing.json.",
        ),
        (model_parallel("/dev/null"), "Cannot parse /dev/null as a json file."),
        # Others.
        ({"horovod": {"enabled": True}}, "unknown distribution strategy 'horovod'"),
        ({"mpi": True}, "mpi of the distribution must be a dictionary"),
        ({"mpi": {"enabled": "yes"}}, "enabled of mpi must be true or false, not 'yes'"),
        ({"mpi": {"processes": 2}}, "mpi has no key 'processes': expects enabled, custom_mpi_opt"),
        ({"mpi": {"enabled": True, "processes_per_host": 0}}, "must be a positive integer, not 0"),
        ({"mpi": {"enabled": True, "processes_per_host": True}}, "positive integer, not True"),
        ({"mpi": {"enabled": True, "custom_mpi_options": "'"}}, "custom_mpi_options"),
        ({"mpi": {"enabled": False}}, 'enables no strategy: one needs "enabled": true'),
        ({}, "enables no strategy"),
        ("{", "--distribution is neither JSON nor a Python dict: '{'"),
        ("/dev/null", "--distribution /dev/null is neither JSON nor a Python dict: ''"),
        ("missing.json", "missing.json: No such file or directory"),
        ("[" * 100_000, "--distribution is neither JSON nor a Python dict: '["),
        (sys.executable, "is neither JSON nor a Python dict: it is no text"),
    ],
)
def test_wrong_distributions(
    capsys: pytest.CaptureFixture[str], distribution: object, text: str
) -> None:
    given = distribution if isinstance(distribution, str) else json.dumps(distribution)
    assert text in refused(capsys, "--distribution", given)


def test_two_numbers_of_ranks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    said = refused(capsys, "--distribution", json.dumps(MPI), "-n", "4")
    assert "has processes_per_host 2, but -n or the host file asks for 4 ranks" in said
    hosts = tmp_path / "hosts"
    hosts.write_text("node0 slots=8")
    options = ["--distribution", json.dumps(MPI), "--hostfile", str(hosts), "--node-rank", "0"]
    assert "processes_per_host 2, but -n or the host file asks for 8" in refused(capsys, *options)


_SCRIPT = """
import os, sys
import smdistributed.modelparallel.torch as smp
smp.init()
told = os.environ["SM_FRAMEWORK_PARAMS"]
sys.stdout.write(f"rank {smp.rank()} of {smp.size()}: partition {smp.pp_rank()}, {told}\\n")
"""


@pytest.mark.slow
def test_wrong_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = json.dumps(model_parallel({"partitions": 2, "memory_weight": 2.0}))
    said = refused(capsys, "--distribution", wrong)
    assert "memory_weight must be between 0.0 and 1.0! The configuration (SM_HP_MP_PAR" in said


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.costly
def test_model_parallel(tmp_path: Path) -> None:
    parameters = tmp_path / "parameters.json"
    parameters.write_text('{"partitions": 2, "ddp": true}')
    distribution = tmp_path / "distribution.json"
    distribution.write_text(json.dumps(model_parallel(str(parameters))))
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT)
    ended = programs.run("-m", "smddp.launch", "--distribution", str(distribution), str(script))
    assert ended.returncode == 0, ended.stderr
    for rank in range(2):
        assert f'rank {rank} of 2: partition {rank}, {{"sagemaker_mpi_enabled":true' in ended.stdout
