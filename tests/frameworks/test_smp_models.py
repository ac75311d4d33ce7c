"""smp trains models of transformers with sharded parameters as one process trains them whole.

`make test-frameworks` installs transformers. The tests are skipped where it is not installed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import cases

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.exhaustive,
    pytest.mark.timeout(660),
    pytest.mark.skipif(
        cases.version("transformers") is None, reason="needs transformers: make test-frameworks"
    ),
]

SHARDED: dict[str, Any] = {"sharded_data_parallel_degree": 2}
OFFLOADED = {**SHARDED, "offload_activations": True}
# All parameters stay whole, and all activations are kept: an oracle.
WHOLE = {**SHARDED, "sdp_param_persistence_threshold": 10**9}
DELAYED = {"delayed_parameter_initialization": True}
FP16, BF16 = ({dtype: True, **DELAYED} for dtype in ("fp16", "bf16"))
# By the number of ranks: what they train, one after the other. See smp_models.py.
JOBS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "sharded": {"config": SHARDED},
        "offloaded, parts of layers": {"config": OFFLOADED, "marks": "parts"},
        "dropout": {"config": OFFLOADED, "dropout": 0.1},
        "dropout, whole": {"config": WHOLE, "dropout": 0.1, "marks": "none"},
        "fp16": {"config": {**SHARDED, **FP16}},
        "fp16, whole": {"config": {**WHOLE, **FP16}, "marks": "none"},
        "bf16": {"config": {**SHARDED, **BF16}},
        "bf16, whole": {"config": {**WHOLE, **BF16}, "marks": "none"},
    },
    4: {
        "two partitions": {"config": {**SHARDED, "partitions": 2}},
        "two partitions, offloaded": {
            "config": {**OFFLOADED, **DELAYED, "partitions": 2, "pipeline": "simple"}
        },
    },
}


def train(file: Path, ranks: int, *arguments: str) -> list[dict[str, Any]]:
    """Returns losses and weights of each model, for each job; without smp if `ranks` is 0."""
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    done = cases.start(
        "smp_models.py",
        *arguments,
        launcher=launcher if ranks else (),
        env={"FRAMEWORKS_OUTPUT": str(file)},
        seconds=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: list[dict[str, Any]] = torch.load(file, weights_only=True)
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Returns what each job has trained, and one process on the data of two replicas."""
    folder = tmp_path_factory.mktemp("models")
    found = {"alone": train(folder / "alone.pt", 0, "--replicas=2")[0]}
    for ranks, jobs in JOBS.items():
        trained = train(folder / f"{ranks}.pt", ranks, *map(json.dumps, jobs.values()))
        found |= dict(zip(jobs, trained, strict=True))
    return found


def compare(results: dict[str, Any], one: str, other: str, losses: float, weights: float) -> None:
    """Checks the differences of all models in losses and weights."""
    for name, expected in results[other].items():
        found = results[one][name]
        assert found["weights"].keys() == expected["weights"].keys()
        pairs = zip(found["losses"], expected["losses"], strict=True)
        in_losses = max(abs(mine - its) for mine, its in pairs)
        in_weights = max(
            float((value - expected["weights"][key]).abs().max())
            for key, value in found["weights"].items()
        )
        print(
            f"{name}, {one!r} and {other!r} differ by {in_losses:.1e} in a loss, "
            f"{in_weights:.1e} in a weight"
        )
        assert in_losses <= losses, name
        assert in_weights <= weights, name


FULL = ["sharded", "offloaded, parts of layers", "two partitions", "two partitions, offloaded"]


@pytest.mark.parametrize("job", FULL)
def test_equals_one_process(job: str, results: dict[str, Any]) -> None:
    compare(results, job, "alone", 1e-6, 1e-6)


def test_dropout_draws_the_same_numbers(results: dict[str, Any]) -> None:
    compare(results, "dropout", "dropout, whole", 1e-6, 1e-6)


@pytest.mark.parametrize(("dtype", "bound"), [("fp16", 4e-3), ("bf16", 2e-2)])
def test_half_precision(dtype: str, bound: float, results: dict[str, Any]) -> None:
    """The losses are about 4, where fp16 has steps of 4e-3, and bf16 of 3e-2."""
    compare(results, dtype, f"{dtype}, whole", 2 * bound, bound)
    compare(results, dtype, "alone", 2 * bound, bound)
