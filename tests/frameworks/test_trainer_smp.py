"""The Trainer of transformers 4.27 in its mode for SageMaker's library trains as in one process.

`tools/setup.sh transformers-4.27` installs it in a folder of its own.
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

PACKAGES = cases.ROOT / "build" / "transformers-4.27"

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.exhaustive,
    pytest.mark.timeout(660),
    pytest.mark.skipif(
        not PACKAGES.exists(), reason="needs transformers 4.27: make test-frameworks"
    ),
]

DIVIDED = {"tensor_parallel_degree": 2, "_match_weights": True}
PARTITIONS = {"partitions": 2, "microbatches": 2}


def train(folder: Path, model: str, config: dict[str, Any] | None, *options: str) -> dict[str, Any]:
    """Returns losses, logits and the weights that the Trainer has saved."""
    folder.mkdir(exist_ok=True)
    # transformers looks for "partitions". torch refuses the Trainer's random states otherwise.
    env = {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}
    env["PYTHONPATH"] = f"{PACKAGES}:{cases.ROOT}"
    launcher: tuple[str, ...] = ()
    if config is not None:
        env["SM_FRAMEWORK_PARAMS"] = json.dumps({"sagemaker_mpi_enabled": True})
        env["SM_HP_MP_PARAMETERS"] = json.dumps({"partitions": 1, "ddp": True, **config})
        ranks = 2 * config.get("partitions", 1)
        launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    done = cases.start(
        *("trainer_smp.py", model, str(folder), *options), launcher=launcher, env=env, seconds=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    weights = torch.load(folder / "final" / "pytorch_model.bin", weights_only=True)
    # Buffers of causal masks are constants.
    kept = {key: value for key, value in weights.items() if ".attn." not in key or "c_" in key}
    return {**found, "logits": torch.load(folder / "logits.pt"), "weights": kept}


@pytest.mark.parametrize("model", ["gpt2", "bert"])
def test_it_trains_saves_and_resumes(model: str, tmp_path: Path) -> None:
    expected = train(tmp_path / "alone", model, None)
    assert expected["losses"]["4"] < expected["losses"]["1"] - 0.3
    divided = train(tmp_path / "tp", model, DIVIDED)
    train(tmp_path / "parts", model, {**DIVIDED, **PARTITIONS}, "--steps=2")
    resumed = train(tmp_path / "parts", model, {**DIVIDED, **PARTITIONS}, "--resume")
    for found in (divided, resumed):
        assert found["losses"] == expected["losses"]
        assert found["weights"].keys() == expected["weights"].keys()
        for key in ("evaluated", "logits", "weights"):
            torch.testing.assert_close(found[key], expected[key], rtol=1e-4, atol=1e-5)
