"""The examples: the script of the guide in both forms, a GPT on real text, a U-Net."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
import torch._dynamo
from ranks import check_ranks

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(170)]
EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def run(script: str, arguments: list[str], parameters: str) -> str:
    if parameters:
        os.environ["SM_HP_MP_PARAMETERS"] = parameters
    sys.argv = [script, *arguments]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    torch.distributed.barrier()
    return printed.getvalue()


def output_of(ranks: int, script: str, *arguments: str, parameters: str = "") -> str:
    printed = check_ranks(run, str(ranks), script, list(arguments), parameters, timeout=150)
    assert not any(printed[1:]), "only rank 0 speaks"
    return printed[0]


@pytest.mark.parametrize("manual", [False, True])
def test_script_of_the_guide(manual: bool) -> None:
    config = {"partitions": 2, "microbatches": 4, "ddp": True, "pipeline": "interleaved"}
    if manual:
        config.update(auto_partition=False, default_partition=0)
    arguments = ["--mp_parameters", "partitions=2,microbatches=4", "--epochs=2"]
    text = output_of(
        4, "smp_digits.py", *arguments, *["--manual"] * manual, parameters=json.dumps(config)
    )
    found = re.search(r"accuracy (\d\.\d+) on held-out digits", text)
    assert found, text
    assert float(found[1]) > 0.5, text


def test_gpt_learns_the_same_text_divided_or_whole(tmp_path: Path) -> None:
    options = ["--steps=12", "--layers=4"]
    whole = output_of(1, "smp_gpt.py", *options)
    divided = output_of(3, "smp_gpt.py", "--partitions=3", *options, "--report", str(tmp_path))
    losses = re.findall(r"loss (\d\.\d+)", whole)
    assert losses == re.findall(r"loss (\d\.\d+)", divided)
    assert float(losses[-1]) < float(losses[0]) - 0.5
    for name in ("partition.svg", "step.svg"):
        assert (tmp_path / name).read_text().startswith("<svg")
    assert "busy" in divided


def test_unet_removes_noise() -> None:
    text = output_of(2, "smp_unet.py", "--partitions=2", "--steps=30")
    left = [float(share) for share in re.findall(r"(\d\.\d+) of the noise", text)]
    assert left[-1] < 0.6 * left[0], text
