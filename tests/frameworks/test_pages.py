"""The scripts of the documentation do what it says, for a user who has no clone.

smddp comes from the wheel in dist/, which `make wheels` builds; without it these tests are skipped.
Scripts, commands and outputs are those of the pages.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import cases

pytestmark = [pytest.mark.multiprocess, pytest.mark.exhaustive, pytest.mark.timeout(1260)]


def page(name: str) -> str:
    return (cases.ROOT / "docs" / name).read_text()


PAGES = page("frameworks.md") + page("launching.md")
# Of each script: the name of its file, its text, the commands, and what they print.
BLOCKS = re.findall(
    r"```python\n# (\w+\.py)\n(.*?)```\n\n```sh\n(.*?)```\n\n```text\n(.*?)```", PAGES, re.DOTALL
)
ON_ONE_HOST = re.findall(r"^((?:torchrun|smddprun) .*?) *# one host", PAGES, re.MULTILINE)
# torchrun is in the environment of torch, not in that of the frameworks.
TORCHRUN = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m torch.distributed.run "$@"\n'


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with the wheel's packages and programs."""
    tag = "cp{}{}".format(*sys.version_info[:2])
    wheels = sorted(
        cases.ROOT.glob(f"dist/smddp-*-{tag}-*.whl"), key=lambda wheel: wheel.stat().st_mtime
    )
    if not wheels:
        pytest.skip("dist/ has no wheel for this Python: run `make wheels`")
    folder = tmp_path_factory.mktemp("installed")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    subprocess.run([*install, "--target", str(folder), str(wheels[-1])], check=True)
    (folder / "bin/torchrun").write_text(TORCHRUN)
    (folder / "bin/torchrun").chmod(0o755)
    return folder


def packages(commands: str) -> list[str]:
    """Returns what the line of pip installs."""
    found = re.search(r"^pip install (.*)$", commands, re.MULTILINE)
    return [name.partition("[")[0] for name in shlex.split(found[1])] if found else []


def with_gloo(text: str) -> str:
    """Returns a script or commands with gloo, and without SageMaker's variable."""
    text = text.replace('strategy="smddp"', 'strategy="ddp"').replace('"smddp"', '"gloo"')
    text = text.replace("sagemaker_trainer.py", "trainer.py")
    return re.sub(r"SMDDP_INSTEAD_OF=gloo |export SM_FRAMEWORK_PARAMS=.*", "", text)


def run(folder: Path, commands: str, installed: Path) -> str:
    """Returns what the commands print, all but that of pip."""
    path = [str(installed / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
    variables = {"PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1", "PATH": ":".join(path)}
    done = subprocess.run(
        ["bash", "-ec", re.sub(r"^pip install .*$", "", commands, flags=re.MULTILINE)],
        cwd=folder,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_every_script_is_tried() -> None:
    assert len(BLOCKS) == PAGES.count("```python") > 0


def test_smddp_is_that_of_the_wheel(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "where.py").write_text("import smddp, smddp.torch._C as c; print(smddp, c)")
    text = run(tmp_path, "python where.py; smddprun -n 1 where.py", installed)
    assert text.count(f"{installed}/smddp") == 4, text
    assert str(cases.ROOT) not in text, text


@pytest.mark.parametrize("name", [block[0] for block in BLOCKS])
def test_a_script_prints_what_the_page_says(name: str, installed: Path, tmp_path: Path) -> None:
    (commands, output) = next(block[2:] for block in BLOCKS if block[0] == name)
    for package in packages(commands):
        if cases.version(package) is None:
            pytest.skip(f"{package} is not installed: pip install {package}")
    change: Callable[[str], str]
    for backend, change in (("smddp", str), ("gloo", with_gloo)):
        folder = tmp_path / backend
        folder.mkdir()
        # All: a script may run another one of the page.
        for file, text, *_ in BLOCKS:
            (folder / file).write_text(change(text))
        printed = run(folder, change(commands), installed)
        for line in output.splitlines():
            assert line.replace("smddp:", f"{backend}:") in printed, printed


@pytest.mark.parametrize("command", ON_ONE_HOST)
def test_a_launcher_runs_the_script_of_the_quickstart(
    command: str, installed: Path, tmp_path: Path
) -> None:
    script = page("quickstart.md").partition("```python\n")[2].partition("```")[0]
    (tmp_path / "train.py").write_text(script)
    text = run(tmp_path, command, installed)
    assert float(re.findall(r"loss ([\d.]+)", text)[0]) < 1e-3, text
    nodes = "2 nodes (2 + 2 ranks)" if "--nodes 2" in command else "1 node (4 ranks)"
    assert f"rank 0 of 4, {nodes}" in text, text
