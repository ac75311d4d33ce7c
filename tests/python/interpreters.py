"""New interpreters for tests of imports, with smddp as if it were installed, or not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import textwrap
from collections.abc import Sequence
from pathlib import Path

import torch
from ranks import ROOT

RELEASE = ".".join(torch.__version__.split(".")[:2])
# What a launcher, smddp or an earlier test may have set.
_UNSET = re.compile(
    "(OMPI_|PMI|MPI_|SLURM_|SM_|SMDATAPARALLEL_|TORCHELASTIC_|MASTER_|LOCAL_)|"
    "(RANK|WORLD_SIZE|DDP_DISABLE_COMM_MEM)$"
)


def environment(**env: str) -> dict[str, str]:
    """Returns the environment of this process, without what launchers set, and with `env`."""
    kept = {name: value for name, value in os.environ.items() if not _UNSET.match(name)}
    # The tests must not depend on an installed package with entry points.
    kept |= {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PYTHONPATH": str(ROOT)}
    return {**kept, **env}


def run(script: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a script in a new interpreter, in which warnings are errors."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script)],
        env=environment(**env),
        cwd="/",  # the current folder, which Python searches before PYTHONPATH
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def run_together(
    command: Sequence[str], environments: Sequence[dict[str, str]]
) -> list[subprocess.CompletedProcess[str]]:
    """Runs `python <command>` in new interpreters at the same time, one for each environment."""
    jobs = [
        subprocess.Popen(
            [sys.executable, *command],
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for variables in environments
    ]
    texts = [job.communicate(timeout=100) for job in jobs]
    return [
        subprocess.CompletedProcess(job.args, job.returncode, *text)
        for job, text in zip(jobs, texts, strict=True)
    ]


def succeed(script: str, **env: str) -> str:
    """Does so, asserts that the script succeeded and wrote no error, and returns its output."""
    ended = run(script, **env)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    return ended.stdout


def install(folder: Path, built_for: str | None = RELEASE, entry_points: bool = True) -> str:
    """Makes a folder look as if smddp were installed there; returns a value for PYTHONPATH.

    Args:
        folder: is empty.
        built_for: the release of torch; None means that there is no compiled module.
        entry_points: whether torch finds them. If not, it does not find those of another
            installation either, so that smddp is not installed as far as torch knows.
    """
    package = folder / "smddp"
    package.mkdir()
    for file in (ROOT / "smddp").iterdir():
        if file.name != "lib":
            (package / file.name).symlink_to(file)
    (package / "lib").mkdir()
    if built_for is not None:
        suffix = sysconfig.get_config_var("EXT_SUFFIX")
        for file in (ROOT / "smddp/lib").iterdir():
            name = file.name
            if name.endswith(suffix):
                name = f"_C_torch{built_for.replace('.', '_')}{suffix}"
            (package / "lib" / name).symlink_to(file)
    (folder / "smdistributed").symlink_to(ROOT / "smdistributed")
    # Python uses the first folder of its search path that has a distribution of this name.
    metadata = folder / "smddp-0.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: smddp\nVersion: 0.1\n")
    lines = []
    for line in (ROOT / "pyproject.toml").read_text().splitlines() if entry_points else ():
        if group := re.fullmatch(r'\[project\.entry-points\."(.+)"\]', line):
            lines.append(f"[{group[1]}]")
        elif line.startswith("smddp = ") and lines:
            lines.append(line.replace('"', ""))
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return str(folder)
