"""Measures how soon the other ranks have their error when one is killed, as torch is installed.

    python benchmarks/deaths.py --trials 40 --json FILE
    python benchmarks/deaths.py --trials 10 --layouts 2 --how torchrun lightning --backend gloo

Unlike faults.py it starts each rank as a program that imports nothing but torch (or the framework),
with torch's Flight Recorder on, by itself or under torchrun. A rank kills itself with SIGKILL in a
loop of all_reduce. For each survivor the script notes when its error came, whether its log names
the rank that was killed, and whether a file of the Flight Recorder is cut.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import pickle
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

# The parent imports no torch: its processor time would be that of the ranks.
TIMEOUT = 180.0
CALLS_BEFORE = 200


# --- in a rank ------------------------------------------------------------------------------------


def _die() -> None:
    Path(os.environ["DEATHS"], "killed").write_text(f"{time.monotonic()} {os.getpid()}")
    os.kill(os.getpid(), signal.SIGKILL)


def _all_reduce() -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group(os.environ["DEATHS_BACKEND"])
    tensor, dies = torch.ones(25_000), dist.get_rank() == dist.get_world_size() - 1
    for _ in range(CALLS_BEFORE):
        dist.all_reduce(tensor)
    if dies:
        _die()
    while True:
        dist.all_reduce(tensor)


class _Numbers:
    """A data set."""

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> dict[str, object]:
        import torch

        return {"x": torch.full((8,), float(index % 7)), "labels": torch.ones(1)}


def _lightning() -> None:
    import lightning
    import torch
    from lightning.pytorch.strategies import DDPStrategy

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 1)

        def training_step(self, batch: dict[str, torch.Tensor], step: int) -> torch.Tensor:
            if step == CALLS_BEFORE and self.trainer.global_rank == self.trainer.world_size - 1:
                _die()
            return (self.layer(batch["x"]) - batch["labels"]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-6)

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy=DDPStrategy(process_group_backend=os.environ["DEATHS_BACKEND"]),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=1,
    )
    trainer.fit(Model(), torch.utils.data.DataLoader(_Numbers(), batch_size=2))  # type: ignore[arg-type]


def _transformers() -> None:
    import torch
    import transformers

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 1)
            self.steps = 0

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            self.steps += 1
            if self.steps == CALLS_BEFORE and os.environ["RANK"] == str(
                int(os.environ["WORLD_SIZE"]) - 1
            ):
                _die()
            return {"loss": (self.layer(x) - labels).square().mean()}

    arguments = transformers.TrainingArguments(
        output_dir=os.environ["DEATHS"],
        use_cpu=True,
        ddp_backend=os.environ["DEATHS_BACKEND"],
        max_steps=1_000_000,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    transformers.Trainer(Model(), arguments, train_dataset=_Numbers()).train()  # type: ignore[arg-type]


WORK: dict[str, Callable[[], None]] = {
    "bare": _all_reduce,
    "torchrun": _all_reduce,
    "lightning": _lightning,
    "transformers": _transformers,
}


def _be_rank(how: str) -> None:
    rank = int(os.environ["RANK"])
    per_node = int(os.environ["DEATHS_PER_NODE"])
    os.environ["SMDDP_NODE_ID"] = f"node{rank // per_node}"
    try:
        WORK[how]()
    except BaseException as error:
        at = time.monotonic()
        name = f"{type(error).__name__}: {error}"
        Path(os.environ["DEATHS"], f"error{rank}").write_text(f"{at} {name}")
        raise


# --- in the parent --------------------------------------------------------------------------------


@dataclasses.dataclass
class Trial:
    """What the survivors of one trial had."""

    milliseconds: list[float | None]  # by rank, from the kill to the error; None: none came
    named: list[bool]  # whether the log of the rank names the one that was killed
    cut: int  # files of the Flight Recorder that are not whole
    files: int
    log: str


def _processes(
    how: str, count: int, folder: Path, env: dict[str, str]
) -> list[subprocess.Popen[bytes]]:
    me = [str(Path(__file__).resolve()), "--rank", how]
    if how != "bare":
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={count}", f"--log-dir={folder / 'logs'}", "--redirects=3"]
        command += me
        return [
            subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        ]
    import socket

    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = str(reserved.getsockname()[1])
    started = []
    for rank in range(count):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        own |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
        own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        log = folder / "logs" / str(rank)
        log.mkdir(parents=True)
        with (log / "stderr.log").open("wb") as file:
            started.append(
                subprocess.Popen([sys.executable, *me], env=env | own, stdout=file, stderr=file)
            )
    return started


def _is_whole(file: Path) -> bool:
    try:
        pickle.loads(file.read_bytes())
    except Exception:
        return False
    return True


def trial(how: str, layout: str, backend: str) -> Trial:
    """Kills the last rank of a job; returns what the others had."""
    nodes, per_node = (
        (int(part) for part in layout.split("x")) if "x" in layout else (1, int(layout))
    )
    count = nodes * per_node
    with tempfile.TemporaryDirectory(prefix="deaths-") as name:
        folder = Path(name)
        (folder / "dumps").mkdir()
        env = os.environ | {
            "DEATHS": name,
            "DEATHS_BACKEND": backend,
            "DEATHS_PER_NODE": str(per_node),
            "TORCH_FR_DUMP_TEMP_FILE": str(folder / "dumps" / "rank_"),
            "OMP_NUM_THREADS": "1",
        }
        if how == "transformers" and backend == "smddp":
            # Accelerate knows no other names on the CPU.
            env |= {"DEATHS_BACKEND": "gloo", "SMDDP_INSTEAD_OF": "gloo"}
        started = _processes(how, count, folder, env)
        deadline = time.monotonic() + TIMEOUT
        for process in started:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        logs = dict.fromkeys(range(count), "")
        for file in sorted((folder / "logs").rglob("std*.log")):
            with contextlib.suppress(ValueError):
                logs[int(file.parent.name)] += file.read_text(errors="replace")
        killed_at, pid = 0.0, ""
        with contextlib.suppress(FileNotFoundError, ValueError):
            at, pid = (folder / "killed").read_text().split()
            killed_at = float(at)
        late: list[float | None] = []
        for rank in range(count - 1):
            file = folder / f"error{rank}"
            text = file.read_text() if file.exists() else ""
            came = text and killed_at  # else the rank failed before another one was killed
            late.append(1e3 * (float(text.split()[0]) - killed_at) if came else None)
        named = [
            "Error" in logs[rank]
            and (f"rank {count - 1} (pid {pid}" in logs[rank] if backend == "smddp" else True)
            for rank in range(count - 1)
        ]
        dumps = list((folder / "dumps").iterdir())
        return Trial(
            late,
            named,
            sum(not _is_whole(file) for file in dumps),
            len(dumps),
            "\n".join(logs.values()),
        )


def main() -> int:
    """Runs the trials, and prints one line for each layout and way to start."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--layouts", nargs="+", default=["2", "4", "2x2"])
    parser.add_argument("--how", nargs="+", default=["bare", "torchrun"], choices=list(WORK))
    parser.add_argument("--backend", default="smddp", choices=["smddp", "gloo"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", choices=list(WORK), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        _be_rank(options.rank)
        return 0
    rows, bad = [], False
    for how in options.how:
        for layout in options.layouts:
            trials = [trial(how, layout, options.backend) for _ in range(options.trials)]
            came = [ms for one in trials for ms in one.milliseconds if ms is not None]
            survivors = sum(len(one.milliseconds) for one in trials)
            row = {
                "how": how,
                "layout": layout,
                "backend": options.backend,
                "trials": options.trials,
                "p50_ms": round(statistics.median(came), 1) if came else None,
                "max_ms": round(max(came), 1) if came else None,
                "errors": len(came),
                "named_in_log": sum(sum(one.named) for one in trials),
                "survivors": survivors,
                "files": sum(one.files for one in trials),
                "cut_files": sum(one.cut for one in trials),
            }
            print(json.dumps(row), flush=True)
            for one in trials:
                if not all(one.named):
                    print(one.log[-4000:], file=sys.stderr)
            bad |= row["named_in_log"] != survivors or row["cut_files"] != 0
            rows.append(row)
    if options.json:
        from smddp.bench.about import write_json

        write_json(options.json, {"rows": rows})
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
