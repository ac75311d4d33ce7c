"""AWS's public scripts that train GPT-2 with SageMaker's library run with smp, unchanged.

They are in the history of github.com/aws/amazon-sagemaker-examples, in the folder
training/distributed_training/pytorch/model_parallel/gpt2: `train_gpt_simple.py` of 2022, and
`train.py` of 2023. GPT2_SCRIPTS names the folders with the scripts, separated by colons; without it
the tests are skipped. `make test-frameworks` installs transformers, which the scripts need.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import cases

FOLDERS = [Path(folder) for folder in os.environ.get("GPT2_SCRIPTS", "").split(":") if folder]

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.exhaustive,
    pytest.mark.timeout(660),
    pytest.mark.skipif(not FOLDERS, reason="GPT2_SCRIPTS does not name folders with the scripts"),
    pytest.mark.skipif(
        cases.version("transformers") is None, reason="needs transformers: make test-frameworks"
    ),
]

SIZES = {
    "max_context_width": 16,
    "vocab_size": 64,
    "hidden_width": 32,
    "num_layers": 4,
    "num_heads": 2,
    "lr": 1e-3,
    "lr_decay_iters": 1000,  # else the rates depend on max_steps
    "warmup": 0,
    "train_batch_size": 4,
    "val_batch_size": 4,
    "validation_batches": 2,
}
# As the launcher of SageMaker passes what the scripts have no option for. With the defaults,
# parameters of these sizes would stay whole, and only sharded gradients would be clipped.
CONFIGURATION = {"sdp_param_persistence_threshold": 100, "sdp_gradient_clipping": 1e9}
NO_DROPOUT = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
# The models of transformers themselves. The default of the scripts, of which some only know it, is
# that of smp with tensor parallelism.
WHOLE = {"use_distributed_transformer": 0, "tensor_parallel_degree": 1, **NO_DROPOUT}
DIVIDED = {"tensor_parallel_degree": 2, **NO_DROPOUT}
SHARDED = {"sharded_data_parallel_degree": 2}
PARTITIONS = {"pipeline_parallel_degree": 2, "microbatches": 2}


class Scripts:
    """A folder with scripts, and one of their jobs."""

    def __init__(self, folder: Path, work: Path) -> None:
        found = [folder / name for name in ("train.py", "train_gpt_simple.py")]
        self.script = next(script for script in found if script.exists())
        self._work = work
        (work / "data").mkdir()
        source = random.Random(3)
        for number in range(2):
            with gzip.open(work / "data" / f"part{number}.json.gz", "wt") as file:
                for _ in range(400):
                    begin = source.randrange(64)
                    tokens = [(begin + 3 * place) % 64 for place in range(16)]
                    line = {"input_ids": tokens, "attention_mask": [1] * 16}
                    file.write(json.dumps(line) + "\n")

    @property
    def knows_sharding(self) -> bool:
        """Whether the script has the option; it ignores those that it does not know."""
        return "sharded_data_parallel_degree" in self.script.read_text()

    def job(self, name: str) -> Path:
        """Returns the folder of a job, with `checkpoints` and `model`."""
        folder = self._work / name
        for part in ("checkpoints", "model"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        return folder

    def train(
        self, name: str, ranks: int, steps: int, kill_at: int | None = None, **options: float
    ) -> list[float]:
        """Runs a job; returns the losses by step, as far as the job has run.

        Args:
            name: of the job.
            ranks: how many there are.
            steps: how many it makes.
            kill_at: kills a rank in this step.
            options: of the script.
        """
        folder = self.job(name)
        every = {**SIZES, "max_steps": steps, **options}
        done = cases.start(
            "without_gpu.py",
            str(self.script),
            f"--checkpoint-dir={folder / 'checkpoints'}",
            *(f"--{key}={value}" for key, value in every.items()),
            launcher=(
                *("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"),
            ),
            env={
                "SM_NUM_GPUS": str(ranks),
                "SM_MODEL_DIR": str(folder / "model"),
                "SM_OUTPUT_DATA_DIR": str(folder),
                "SM_CHANNEL_TRAIN": str(self._work / "data"),
                "SM_CHANNEL_TEST": str(self._work / "data"),
                "SM_HP_MP_PARAMETERS": json.dumps(CONFIGURATION),
                # Those of spring 2022 keep objects of their own in checkpoints.
                "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",
            },
            seconds=600,
            kill_at=None if kill_at is None else f"Batch {kill_at - 1} Loss",
        )
        text = done.stdout + done.stderr
        found = re.findall(r"Batch (\d+) Loss: (\S+?),", text)
        if kill_at is None:
            assert done.returncode == 0, text
            assert "SMP training finished successfully" in text
            assert [int(step) for step, _ in found] == list(range(steps - len(found), steps)), text
        else:
            assert done.returncode != 0, text
            assert len(found) >= kill_at, text
        return [float(loss) for _, loss in found]


@pytest.fixture(scope="module", params=FOLDERS, ids=[folder.name for folder in FOLDERS])
def scripts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Scripts:
    """Returns the scripts of a folder."""
    return Scripts(request.param, tmp_path_factory.mktemp("gpt2"))


@pytest.fixture(scope="module")
def whole(scripts: Scripts) -> list[float]:
    """Returns the losses of two replicas; their checkpoints and their model are in job "whole"."""
    return scripts.train(
        "whole", 2, 6, checkpoint_freq=3, validation_freq=3, save_final_full_model=1, **WHOLE
    )


def need_sharding(scripts: Scripts) -> None:
    if not scripts.knows_sharding:
        pytest.skip(f"{scripts.script} is older than sharded data parallelism")


def test_it_trains_and_loads_its_model(scripts: Scripts, whole: list[float]) -> None:
    assert whole[-1] < whole[0]
    shutil.copytree(scripts.job("whole") / "model", scripts.job("again") / "model", dirs_exist_ok=1)
    again = scripts.train("again", 4, 2, load_full=1, **PARTITIONS, **WHOLE)
    assert again[0] < whole[-2]


def test_it_resumes_with_partitions(scripts: Scripts, whole: list[float]) -> None:
    options = {**PARTITIONS, **WHOLE, "checkpoint_freq": 3}
    first = scripts.train("parts", 4, 3, **options)
    second = scripts.train("parts", 4, 6, **options, load_partial=1)
    assert len(second) == 3
    assert [*first, *second] == pytest.approx(whole, abs=2e-5)


def test_sharded_it_resumes(scripts: Scripts, whole: list[float]) -> None:
    need_sharding(scripts)
    options = {**SHARDED, **WHOLE, "checkpoint_freq": 3, "enable_memory_profiling": 1}
    first = scripts.train("sharded", 2, 3, **options)
    options |= PARTITIONS | {"offload_activations": 1, "checkpoint_sublayers": 1}
    second = scripts.train("sharded", 4, 6, **options, load_partial=1, save_final_full_model=1)
    assert len(second) == 3
    assert [*first, *second] == pytest.approx(whole, abs=2e-5)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_half_precision(dtype: str, scripts: Scripts, whole: list[float]) -> None:
    """The loss scale of fp16 begins so high that more than 20 steps are left out."""
    need_sharding(scripts)
    options = {dtype: 1, **SHARDED, "delayed_param": 1, "gradient_accumulation": 2}
    losses = scripts.train(dtype, 2, {"fp16": 80, "bf16": 10}[dtype], **options, **WHOLE)
    assert losses[0] == pytest.approx(whole[0], abs=0.05)
    assert losses[-1] < losses[0] - 0.02


@pytest.fixture(scope="module")
def divided(scripts: Scripts) -> list[float]:
    """Returns the losses of one tensor-parallel group."""
    return scripts.train("divided", 2, 6, save_final_full_model=1, **DIVIDED)


def test_the_distributed_transformer_is_the_same_at_any_degree(scripts: Scripts) -> None:
    if "use_distributed_transformer" not in scripts.script.read_text():
        pytest.skip(f"{scripts.script} uses it at degrees from 2 only")
    # Else the ranks of a group draw their parts of the weights with seeds of their own.
    options = {**DIVIDED, "same_seed": 1}
    divided = scripts.train("same seed", 2, 4, **options)
    alone = scripts.train("alone", 1, 4, **{**options, "tensor_parallel_degree": 1})
    assert divided[-1] < divided[0]
    assert alone == pytest.approx(divided, abs=2e-5)


def test_divided_it_resumes_after_a_kill(scripts: Scripts, divided: list[float]) -> None:
    if 'opt_state_dict["loss_scaler"]' in scripts.script.read_text():
        pytest.skip(f"{scripts.script} resumes with its own half precision only")
    options = {**DIVIDED, **PARTITIONS, "checkpoint_freq": 3}
    first = scripts.train("killed", 4, 1000, kill_at=5, **options)
    second = scripts.train("killed", 4, 6, **options, load_partial=1)
    assert len(second) < 6
    assert [*first[: 6 - len(second)], *second] == pytest.approx(divided, abs=2e-5)


def test_divided_with_partitions_and_replicas(scripts: Scripts) -> None:
    replicas = scripts.train("replicas", 4, 4, **DIVIDED)
    all_three = scripts.train("all three", 8, 4, **DIVIDED, **PARTITIONS)
    assert all_three == pytest.approx(replicas, abs=2e-5)


def test_divided_with_the_script_s_own_half_precision(scripts: Scripts) -> None:
    """The loss scale begins so high that about 20 steps are left out."""
    if not (scripts.script.parent / "fp16").exists():
        pytest.skip(f"{scripts.script} has no classes for half precision")
    options = {**DIVIDED, "fp16": 1, "checkpoint_freq": 30}
    first = scripts.train("half", 2, 30, **options)
    second = scripts.train("half", 2, 40, **options, load_partial=1)
    assert len(second) == 10
    assert max(second) < min(first[:20])
