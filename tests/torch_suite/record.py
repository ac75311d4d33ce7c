"""The record of torch's suite: the result of each test, and the reasons of tests that do not pass.

There is one file per configuration, with one line per test: its name, a tab, and `passes`, `skips:
` with the suite's reason, or `fails: ` with the key of an explanation.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from torch_suite.suite import Outcome

FOLDER = Path(__file__).parent / "recorded"


@dataclasses.dataclass(frozen=True)
class Configuration:
    """A world size and a set of gates."""

    world_size: int
    mapped: bool = False

    @property
    def name(self) -> str:
        return f"{'mapped' if self.mapped else 'cpu'}-{self.world_size}"

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.name}.txt"


# CI runs a test in the first of these in which it passes.
CONFIGURATIONS = [
    *(Configuration(size) for size in (3, 4, 2)),
    *(Configuration(size, mapped=True) for size in (2, 3, 4)),
]

# Reasons of failures: key -> (a part of the test's output, the reason in one sentence). The first
# entry that matches counts.
EXPLANATIONS: dict[str, tuple[str, str]] = {
    "name": (
        r"'custom' != 'smddp'",
        'torch itself calls every backend that it does not ship "custom" in DDP\'s logging data',
    ),
    "nccl": (
        r"ProcessGroupNCCL is only supported with GPUs",
        "creates an object of NCCL",
    ),
    "words": (
        r'"caught collective operation timeout" does not match',
        "expects the text of NCCL's timeout",
    ),
    "sync batch norm": (
        r"SyncBatchNorm layers only work with GPU modules",
        "torch's SyncBatchNorm rejects modules on the CPU",
    ),
    "device ids": (
        r"String comparison failed: '' != '\d'|None mismatch: None is not \d",
        "asks for the device ids of a model, which a model on the CPU does not have",
    ),
    "thirds": (
        r"Params not equal at iteration",
        "compares (g + g + g) / 3 with g, and lets the loss diverge, so that roundings grow",
    ),
    "cuda": (
        r"CUDA driver version is insufficient|No CUDA GPUs are available",
        "asks CUDA for what has no like on the CPU",
    ),
}


# Reasons of tests that are always skipped: (the suite's text, the reason).
SKIPS = [
    (
        r"https://github.com/pytorch/pytorch/|see https://",
        "switched off in torch, for all backends",
    ),
    (r"no torchvision", "needs torchvision"),
]


def explain(outcome: Outcome) -> str:
    """Returns the text of the record for an outcome."""
    if outcome.status == "passes":
        return "passes"
    if outcome.status == "skips":
        return f"skips: {' '.join(outcome.detail.split())}"
    for key, (pattern, _) in EXPLANATIONS.items():
        if re.search(pattern, outcome.detail):
            return f"fails: {key}"
    return "fails: unexplained"


def read(configuration: Configuration) -> dict[str, str]:
    """Returns the record of a configuration, by test."""
    lines = configuration.path.read_text().splitlines()
    return dict(line.split("\t", 1) for line in lines)


def write(configuration: Configuration, outcomes: Mapping[str, str]) -> None:
    """Writes the record of a configuration."""
    FOLDER.mkdir(exist_ok=True)
    lines = (f"{name}\t{how}\n" for name, how in sorted(outcomes.items()))
    configuration.path.write_text("".join(lines))


def served_first_by(configuration: Configuration) -> list[str]:
    """Returns the tests that pass here, but in no configuration before. CI runs them here."""
    earlier = CONFIGURATIONS[: CONFIGURATIONS.index(configuration)]
    done = {name for one in earlier for name, how in read(one).items() if how == "passes"}
    return [n for n, how in read(configuration).items() if how == "passes" and n not in done]


def never_passing() -> dict[str, str]:
    """Returns the reason for each test that passes in no configuration.

    Raises:
        LookupError: a test fails, or is always skipped, and nothing explains it.
    """
    records = [read(configuration) for configuration in CONFIGURATIONS]
    reasons = {}
    for name in sorted(records[0]):
        ends = [record[name] for record in records]
        if "passes" in ends:
            continue
        # A failure tells more than the reason for which another configuration skips the test.
        end = next((how for how in ends if how.startswith("fails")), ends[0])
        reasons[name] = _reason(name, end)
    return reasons


def _reason(name: str, end: str) -> str:
    how, _, why = end.partition(": ")
    if how == "fails" and why in EXPLANATIONS:
        return EXPLANATIONS[why][1]
    for pattern, reason in SKIPS:
        if how == "skips" and re.search(pattern, why):
            return reason
    raise LookupError(f"nothing explains {name}: {end}")


def differences(
    recorded: Mapping[str, str], found: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """Returns sentences about tests with worse results, and about tests that are new."""
    worse: list[str] = []
    new: list[str] = []
    for name, how in sorted(found.items()):
        before = recorded.get(name, "not recorded")
        if how == before:
            continue
        sentence = f'{name}: recorded is "{before}", found "{how}"'
        (worse if before == "passes" or how == "fails: unexplained" else new).append(sentence)
    return worse, new


def counts(outcomes: Iterable[str]) -> dict[str, int]:
    """Returns the numbers of tests that pass, skip and fail."""
    result = {"passes": 0, "skips": 0, "fails": 0}
    for how in outcomes:
        result[how.split(":")[0]] += 1
    return result
