"""The scripts of this folder: what starts each, and what it needs. Runs one of them."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
TORCHRUN_4 = (*TORCHRUN[:-1], "--nproc-per-node=4")
TWO_NODES = ("-m", "smddp.launch", "-n", "4", "--nodes", "2")


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to use a framework."""

    name: str
    package: str  # on the package index
    script: str
    arguments: tuple[str, ...] = ()
    # With gloo, which cannot do what `arguments` ask for. None: the same.
    gloo_arguments: tuple[str, ...] | None = None
    launcher: tuple[str, ...] = TORCHRUN
    instead_of: bool = False  # SMDDP_INSTEAD_OF=gloo is the switch, and no argument

    def __str__(self) -> str:
        return self.name

    @property
    def how(self) -> str:
        """Returns what starts the ranks."""
        own = {
            "accelerate": "debug_launcher",
            "lightning": "itself",
            "pytorch-lightning": "itself",
            "ray": "Ray",
        }
        names = {TORCHRUN: "torchrun, 2", TORCHRUN_4: "torchrun, 4", TWO_NODES: "smddprun, 2x2"}
        return names.get(self.launcher) or f"{own[self.package]}, 2"


CASES = [
    Case("DDP, torch.compile", "torch", "ddp.py", ("--compile",)),
    Case("ZeroRedundancyOptimizer, overlapped", "torch", "ddp.py",
         ("--zero=overlap",), ("--zero=plain",)),
    Case("pipelining, GPipe", "torch", "pipelining.py", ("--schedule=gpipe",)),
    Case("pipelining, 1F1B", "torch", "pipelining.py", ("--schedule=1f1b",)),
    Case("distributed.checkpoint.async_save", "torch", "async_checkpoint.py"),
    Case("Lightning, DDPStrategy", "lightning", "lightning_trainer.py", launcher=()),
    Case('Lightning, strategy="smddp"', "lightning", "lightning_trainer.py",
         ("--strategy=name",), launcher=()),
    Case("Lightning, ModelParallelStrategy (FSDP2)", "lightning", "lightning_trainer.py",
         ("--strategy=fsdp2",), launcher=()),
    Case("Lightning, LightningEnvironment", "pytorch-lightning", "seeds/lightning_environment.py"),
    Case("Fabric, DDPStrategy", "lightning", "lightning_fabric.py", launcher=()),
    Case('Fabric, strategy="smddp"', "lightning", "lightning_fabric.py",
         ("--strategy=name",), launcher=()),
    Case("Fabric, ModelParallelStrategy (FSDP2)", "lightning", "lightning_fabric.py",
         ("--strategy=fsdp2",), launcher=()),
    Case("Accelerate, group made before", "accelerate", "accelerate_train.py"),
    Case("Accelerate, SMDDP_INSTEAD_OF", "accelerate", "accelerate_train.py", instead_of=True),
    Case("Accelerate, started from a notebook", "accelerate", "accelerate_train.py", ("--start",),
         launcher=(), instead_of=True),
    Case("Accelerate, 2 nodes", "accelerate", "accelerate_train.py", launcher=TWO_NODES),
    Case("Trainer, SMDDP_INSTEAD_OF", "transformers", "transformers_trainer.py", instead_of=True),
    Case("Trainer, variables of SageMaker", "transformers", "transformers_sagemaker.py"),
    Case('generation, tp_plan="auto"', "transformers", "tensor_parallel.py"),
    Case('generation, tp_plan="auto", 4 ranks', "transformers", "tensor_parallel.py",
         launcher=TORCHRUN_4),
    Case('training, tp_plan="auto"', "transformers", "tensor_parallel.py", ("--train",)),
    Case('training, tp_plan="auto", 4 ranks', "transformers", "tensor_parallel.py", ("--train",),
         launcher=TORCHRUN_4),
    Case("Ray Train, TorchConfig", "ray", "ray_train.py", launcher=()),
    Case("ZeRO-1", "deepspeed", "deepspeed_zero.py", ("--stage=1",)),
    Case("ZeRO-2", "deepspeed", "deepspeed_zero.py", ("--stage=2",)),
    Case("ZeRO-3", "deepspeed", "deepspeed_zero.py", ("--stage=3",)),
]  # fmt: skip


def version(package: str) -> str | None:
    """Returns the version of an installed package, or None."""
    try:
        return importlib.metadata.version(package).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None


def start(
    script: str,
    *arguments: str,
    launcher: tuple[str, ...] = TORCHRUN,
    env: dict[str, str] | None = None,
    seconds: float = 300,
    kill_at: str | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs a script of this folder, in this Python.

    Args:
        script: its name.
        arguments: of the script.
        launcher: what starts the ranks.
        env: more environment variables.
        seconds: the longest time it may take.
        kill_at: kills one of the ranks when the output has this text.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment |= {"PYTHONWARNINGS": "ignore", "TOKENIZERS_PARALLELISM": "false"} | (env or {})
    command = [sys.executable, *launcher, str(HERE / script), *arguments]
    if kill_at is None:
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=seconds
        )
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)

        def text() -> str:
            return os.pread(output.fileno(), 1 << 24, 0).decode()

        until = time.monotonic() + seconds
        while kill_at not in text() and process.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        if process.poll() is None:
            ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            os.kill(int(ranks[-1]), signal.SIGKILL)
            process.wait(seconds)
        return subprocess.CompletedProcess(command, process.returncode, text(), "")


def run(case: Case, backend: str, folder: Path) -> dict[str, Any]:
    """Runs a case with one backend.

    Args:
        case: the case.
        backend: smddp or gloo.
        folder: where the script may write its result.

    Returns:
        What outcome.report() wrote, and "command_seconds", which includes imports.

    Raises:
        RuntimeError: the script failed. The text has its output.
    """
    arguments = case.arguments
    if backend == "gloo" and case.gloo_arguments is not None:
        arguments = case.gloo_arguments
    result = folder / f"{backend}.pt"
    variables = {"FRAMEWORKS_OUTPUT": str(result)}
    if not case.instead_of:
        arguments = (*arguments, f"--backend={backend}")
    elif backend == "smddp":
        variables["SMDDP_INSTEAD_OF"] = "gloo"
    began = time.monotonic()
    done = start(case.script, *arguments, launcher=case.launcher, env=variables)
    elapsed = time.monotonic() - began
    if done.returncode != 0 or not result.exists():
        raise RuntimeError(f"{case} with {backend}: {done.stdout}{done.stderr}")
    return {**torch.load(result), "command_seconds": elapsed}


def difference(mine: dict[str, Any], other: dict[str, Any]) -> float:
    """Returns the largest difference of two results in a weight or the loss."""
    pairs = zip(mine["weights"], other["weights"], strict=True)
    apart = [float((ours - theirs).abs().max()) for ours, theirs in pairs]
    return max([*apart, abs(mine["loss"] - other["loss"])])
