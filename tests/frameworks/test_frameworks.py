"""Frameworks train over smddp what they train over gloo; their scripts are not changed for it.

`make test-frameworks` installs the frameworks. Here each is skipped where it is not installed.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import cases

pytestmark = [pytest.mark.multiprocess, pytest.mark.exhaustive, pytest.mark.timeout(660)]

TOLERANCE = 1e-5


def need(package: str) -> None:
    if cases.version(package) is None:
        pytest.skip(f"{package} is not installed: pip install {package}")


@pytest.mark.parametrize("case", cases.CASES, ids=str)
def test_equals_gloo(case: cases.Case, tmp_path: Path) -> None:
    need(case.package)
    mine = cases.run(case, "smddp", tmp_path)
    theirs = cases.run(case, "gloo", tmp_path)
    apart = cases.difference(mine, theirs)
    print(
        f"{case}: {mine['seconds']:.2f} s with smddp, {theirs['seconds']:.2f} s with gloo; "
        f"largest difference {apart:.1e}"
    )
    assert (mine["backend"], theirs["backend"]) == ("smddp", "gloo")
    assert apart <= TOLERANCE


def failed(done: subprocess.CompletedProcess[str]) -> str:
    text = done.stdout + done.stderr
    assert done.returncode != 0, text
    return text


def test_a_checkpoint_in_the_training_s_group_gets_an_error_that_says_so() -> None:
    text = failed(cases.start("async_checkpoint.py", "--share"))
    assert "CollectiveMismatchError" in text
    assert "async_save" in text
    assert "process_group=torch.distributed.new_group()" in text


def test_steps_in_callbacks_end_with_the_names_of_both_calls() -> None:
    """Such calls have another order on each rank: torch refuses this hook for gloo by name."""
    text = failed(cases.start("ddp.py", "--zero=interleaved"))
    assert "is in allreduce" in text
    assert "is in broadcast" in text
    assert "Gloo backend using Overlapping DDP with ZeRO may meet hangs" in failed(
        cases.start("ddp.py", "--zero=interleaved", "--backend=gloo")
    )


@pytest.mark.parametrize("script", ["lightning_trainer.py", "lightning_fabric.py"])
def test_lightning_s_fsdp_strategy_wants_a_gpu(script: str) -> None:
    """docs/frameworks.md says so. If this fails, the page can say that it works."""
    need("lightning")
    text = failed(cases.start(script, "--strategy=fsdp1", launcher=()))
    assert "GPU" in text


def test_importing_smddp_does_not_import_lightning() -> None:
    code = "import sys, smddp; assert not any('lightning' in name for name in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=cases.ROOT, check=False)
    assert done.returncode == 0


def test_the_ddp_tutorial() -> None:
    done = cases.start("seeds/ddp_tutorial.py", launcher=())
    assert done.returncode == 0, done.stdout + done.stderr
    for what in ("basic DDP", "DDP checkpoint", "DDP with model parallel"):
        for rank in range(2):
            assert f"Running {what} example on rank {rank}." in done.stdout


def test_the_ddp_tutorial_under_torchrun() -> None:
    done = cases.start("seeds/elastic_ddp.py")
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        assert f"Finished running basic DDP example on rank {rank}." in done.stdout


PAGE = cases.ROOT / "docs/frameworks.md"
SCRIPTS = re.findall(r"```python\n# run it with: (\w+)\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.parametrize("number", range(len(SCRIPTS)))
def test_a_script_of_the_page(number: int, tmp_path: Path) -> None:
    launcher, text = SCRIPTS[number]
    for package in ("lightning", "accelerate", "transformers"):
        if re.search(rf"^(import|from) {package}\b", text, re.MULTILINE):
            need(package)
    script = tmp_path / "script.py"
    script.write_text(text)
    done = cases.start(str(script), launcher=cases.TORCHRUN if launcher == "torchrun" else ())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "smddp" in done.stdout + done.stderr
