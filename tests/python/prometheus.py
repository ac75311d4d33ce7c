"""A strict parser of Prometheus's text exposition format, for tests."""

from __future__ import annotations

import dataclasses
import re

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\["\\n])*)"(?:,|$)')
_SAMPLE = re.compile(rf"({_NAME})(?:\{{(.*)\}})? (\S+)")
_TYPES = ("counter", "gauge", "histogram")

Labels = tuple[tuple[str, str], ...]


@dataclasses.dataclass
class Family:
    """The samples of one metric.

    Attributes:
        kind: "counter", "gauge" or "histogram".
        samples: values by (name of the sample, its labels in alphabetical order).
    """

    kind: str
    samples: dict[tuple[str, Labels], float] = dataclasses.field(default_factory=dict)

    def total(self, suffix: str = "", **labels: str) -> float:
        """Returns the sum of the samples whose name ends so and that have these labels."""
        return sum(
            value
            for (name, its), value in self.samples.items()
            if name.endswith(suffix) and labels.items() <= dict(its).items()
        )


def _labels(text: str) -> Labels:
    found = {}
    position = 0
    while position < len(text):
        match = _LABEL.match(text, position)
        assert match is not None, f"not a label: {text[position:]!r}"
        assert match[1] not in found, f"{match[1]} is there twice: {text!r}"
        found[match[1]] = re.sub(r"\\(.)", lambda m: "\n" if m[1] == "n" else m[1], match[2])
        position = match.end()
    assert not text.endswith(","), text
    return tuple(sorted(found.items()))


def _check_histogram(name: str, family: Family) -> None:
    series: dict[Labels, list[tuple[float, float]]] = {}
    for (sample, labels), value in family.samples.items():
        if sample == f"{name}_bucket":
            rest = tuple(label for label in labels if label[0] != "le")
            series.setdefault(rest, []).append((float(dict(labels)["le"]), value))
    limits = {tuple(limit for limit, _ in buckets) for buckets in series.values()}
    assert len(limits) <= 1, "all series need the same buckets, or they cannot be added"
    for labels, buckets in series.items():
        assert buckets == sorted(buckets), "limits and numbers must not decrease"
        assert buckets[-1][0] == float("inf")
        assert buckets[-1][1] == family.samples[f"{name}_count", labels]
        assert (f"{name}_sum", labels) in family.samples
    assert len(family.samples) == sum(len(buckets) + 2 for buckets in series.values())


def parse(text: str) -> dict[str, Family]:
    """Returns the families of a text by name.

    Raises:
        AssertionError: the text does not have the format.
    """
    assert text.endswith("\n")
    families: dict[str, Family] = {}
    helped, current = "", ""
    for line in text.splitlines():
        if line.startswith("# HELP "):
            helped = line.split(" ", 3)[2]
            assert re.fullmatch(_NAME, helped)
            assert helped not in families, "the lines of a family must be together"
            assert len(line.split(" ", 3)[3]) > 0
            continue
        if line.startswith("# TYPE "):
            _, _, current, kind = line.split(" ")
            assert current == helped, "HELP comes right before TYPE"
            assert kind in _TYPES
            assert (kind == "counter") == current.endswith("_total")
            families[current] = Family(kind)
            continue
        match = _SAMPLE.fullmatch(line)
        assert match is not None, f"not a sample: {line!r}"
        family = families[current]
        suffixes = ("_bucket", "_sum", "_count") if family.kind == "histogram" else ("",)
        assert match[1] in {current + suffix for suffix in suffixes}, line
        key = match[1], _labels(match[2] or "")
        assert key not in family.samples, f"twice: {line!r}"
        family.samples[key] = float(match[3])
        assert family.samples[key] >= 0, line
    for name, family in families.items():
        if family.kind == "histogram":
            _check_histogram(name, family)
    return families
