"""Writes benchmarks/results/README.md, tables of what the files beside it hold.

    python benchmarks/summary.py

tests/python/test_bench_figures.py compares that page with what this script makes.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PAGE = RESULTS / "README.md"
SIZES = (8, 4 << 10, 32 << 10, 256 << 10, 1 << 20, 2 << 20, 16 << 20, 25 << 20, 64 << 20)
HEAD = """# Results

`python benchmarks/summary.py` writes this page from the files beside it.
[benchmarks/README.md](../README.md) says how to add one, and what limits the figures.

A file is named after what was measured, the layout, the machine and the day. For each layout only
the newest is kept, and 30 files at most. `ranks4` is 4 ranks of one node, `nodes2x2` 2 nodes of 2
ranks played by one machine, `hosts2x2_1gbit` 2 network namespaces joined by a link of that rate,
`gpu_ranks4` 4 ranks that share the memory of one GPU. In files with `busy`, another program used
one of the two cores.

Speeds of one machine change by a factor of two from minute to minute. Compare the backends within
one file, not times of two files. "1.5 / 2.0" is ordinary memory / communication memory.
"""

Rows = list[dict[str, Any]]


def _size(count: int) -> str:
    """Returns 262144 as "256 KiB"."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count >= 1 << power:
            return f"{count / (1 << power):.3g} {unit}"
    return f"{count} B"


def _number(value: float) -> str:
    """Returns two digits, and more only before the decimal point."""
    return f"{value:.2g}" if value < 99.5 else f"{value:.0f}"


def _table(head: list[str], lines: Iterable[list[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def _command(read: dict[str, Any]) -> str:
    """Returns the arguments that a file records, with FILE for the name of a file."""
    for key in ("args", "arguments", "command", "options"):
        words = read.get(key, "")
        if isinstance(words, dict):
            given = {name: value for name, value in words.items() if value not in (None, "FILE")}
            texts = {
                name: " ".join(map(str, value)) if isinstance(value, list) else str(value)
                for name, value in given.items()
            }
            words = " ".join(f"--{name} {text}" for name, text in texts.items())
        elif isinstance(words, list):
            words = shlex.join("FILE" if word.endswith(".json") else word for word in words)
        if words:
            return f"`{words}`"
    return ""


def _time(row: dict[str, Any]) -> float:
    """Returns the median in µs; in place, if the call can run in place."""
    return float((row["in_place"] or row["out_of_place"])["time"])


def _speedups(rows: Rows, backend: str) -> dict[tuple[str, int], str]:
    """Returns how many times as fast as a backend smddp is, by (call, bytes)."""
    theirs = {
        (row["collective"], row["size"]): _time(row) for row in rows if row["backend"] == backend
    }
    found: dict[tuple[str, int], list[str]] = {}
    for row in rows:
        call = row["collective"], row["size"]
        if row["backend"] == "smddp" and not row["algorithm"] and call in theirs:
            found.setdefault(call, []).append(_number(theirs[call] / _time(row)))
    return {call: " / ".join(each) for call, each in found.items()}


def _shares(rows: Rows) -> dict[tuple[str, int], str]:
    """Returns the share of the bound's speed in %, by (call, bytes)."""
    found: dict[tuple[str, int], list[str]] = {}
    for row in rows:
        if row["backend"] == "smddp" and not row["algorithm"] and row["of_bound"]:
            call = row["collective"], row["size"]
            found.setdefault(call, []).append(f"{100 * row['of_bound']:.0f}")
    return {call: " / ".join(each) for call, each in found.items()}


def _by_size(
    files: dict[str, Any], figures: Callable[[Rows], dict[tuple[str, int], str]], least: int = 0
) -> str:
    """Returns a table of allreduce with a line per file and a column per size."""
    found: dict[str, dict[int, str]] = {}
    for name, read in files.items():
        texts = {size: text for (_, size), text in figures(read["results"]).items()}
        if texts:
            found[name] = texts
    sizes = [
        size for size in SIZES if size >= least and any(size in each for each in found.values())
    ]
    lines = [[name, *(each.get(size, "") for size in sizes)] for name, each in found.items()]
    return _table(["", *map(_size, sizes)], lines)


def _bound_means_something(read: dict[str, Any]) -> bool:
    """Returns False where ranks of one node share cores: then the bound's ranks take turns, too."""
    config = read["config"]
    return len(config["ranks_of_nodes"]) > 1 or config["ranks"] <= config["cores"]


def _largest(files: dict[str, Any]) -> str:
    """Returns a table with a line per collective at its largest size, and a column per file."""
    columns = []
    for read in files.values():
        speedups = _speedups(read["results"], "gloo")
        columns.append({call: (size, text) for (call, size), text in speedups.items()})
    lines = [
        [call, _size(size), *(column.get(call, (0, ""))[1] for column in columns)]
        for call, (size, _) in columns[0].items()
    ]
    return _table(["", "size", *files], lines)


def _training(files: dict[str, Any]) -> str:
    lines = []
    for name, read in files.items():
        models: dict[str, dict[str, str]] = {}
        for row in read["results"]:
            models.setdefault(row["model"], {})[row["backend"]] = f"{row['x_none']:.2f}"
        lines += [
            [name, model, *(found.get(backend, "") for backend in ("smddp", "gloo", "fake"))]
            for model, found in models.items()
        ]
    return _table(["", "model", "smddp", "gloo", "fake"], lines)


def _pipelines(files: dict[str, Any]) -> str:
    (read,) = files.values()
    systems = list(dict.fromkeys(row["who"] for row in read["results"]))
    counts = sorted({row["microbatches"] for row in read["results"]})
    found: dict[tuple[int, str, int], dict[str, str]] = {}
    for row in read["results"]:
        key = row["partitions"], row["pipeline"], row["microbatches"]
        found.setdefault(key, {})[row["who"]] = f"{100 * row['share_of_bound']:.1f}"
    lines = []
    for ranks, pipeline in dict.fromkeys(key[:2] for key in found):
        cells = [found.get((ranks, pipeline, count), {}) for count in counts]
        texts = [" / ".join(cell[who] for who in systems if who in cell) for cell in cells]
        lines.append([str(ranks), pipeline, *texts])
    return _table(["ranks", "pipeline", *map(str, counts)], lines)


def _calls(files: dict[str, Any]) -> str:
    (read,) = files.values()
    lines = [
        [row["what"], f"{row['forward_us']:.0f}", f"{row['backward_us'] or 0:.0f}"]
        for row in read["results"]
    ]
    return _table(["", "forward", "backward"], lines)


def _sleeping(files: dict[str, Any]) -> str:
    """Returns a table of the sharded runs, whose ratio is that to runs without sharding."""
    lines = [
        [
            *(f"{1e3 * read['options']['seconds']:.0f}", str(row["ranks"]), str(row["partitions"])),
            *(f"{row['step_ms']:.0f}", f"{row['ratio']:.2f}"),
        ]
        for read in files.values()
        for row in read["rows"]
        if row["variant"] == "sharded"
    ]
    return _table(["sleep, ms", "ranks", "partitions", "step, ms", "of the same without"], lines)


def _sharding(files: dict[str, Any]) -> str:
    (read,) = files.values()
    lines = [
        [
            *(str(row["ranks"]), row["variant"], f"{row['step_ms']:.0f}"),
            *(f"{row['processor_ms']:.0f}", f"{row['peak_mib']:.0f}"),
        ]
        for row in read["rows"]
    ]
    return _table(["ranks", "", "step, ms", "processor, ms", "memory, MiB"], lines)


def _blocks(files: dict[str, Any]) -> str:
    (read,) = files.values()
    found: dict[tuple[int, str], dict[int, str]] = {}
    for row in read["rows"]:
        cells = found.setdefault((row["ranks"], row["variant"]), {})
        cells[row["bytes"]] = f"{row['step_ms']:.1f} ({row['of_smp']:.2f})"
    sizes = sorted({row["bytes"] for row in read["rows"]})
    lines = [
        [str(ranks), variant, *(cells[size] for size in sizes)]
        for (ranks, variant), cells in found.items()
    ]
    return _table(["ranks", "", *map(_size, sizes)], lines)


def _tensorflow(files: dict[str, Any]) -> str:
    lines = []
    for layout, read in files.items():
        steps = [row for row in read["results"] if "model" in row]
        own = {row["model"]: row["ms"] for row in steps if row["what"] == "smddp"}
        lines += [
            [
                *(layout, row["model"], row["what"], f"{row['ms']:.1f}"),
                f"{row['ms'] / own[row['model']]:.2f}",
            ]
            for row in steps
        ]
    return _table(["layout", "gradients", "", "step, ms", "smddp = 1"], lines)


def _operations(files: dict[str, Any]) -> str:
    lines = [
        [str(row["ranks"]), row["what"], str(row["median"]), str(row["median_above"])]
        for read in files.values()
        for row in read["results"]
        if "median" in row and "eager" in row["what"]
    ]
    return _table(["ranks", "", "µs", "above tf.identity"], lines)


def _startup(files: dict[str, Any]) -> str:
    (read,) = files.values()
    medians = read["medians_ms"]
    phases = list(medians["smddp"])
    lines = [[name, *(f"{found[key]:.1f}" for key in phases)] for name, found in medians.items()]
    return _table(["", *phases], lines)


def summary() -> str:
    """Returns the page."""
    files = {path: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}

    def those(start: str) -> dict[str, Any]:
        """Returns what files of one kind hold, by layout and machine."""
        return {
            path.stem.removeprefix(start).rsplit("_", 1)[0]: read
            for path, read in files.items()
            if path.stem.startswith(start)
        }

    allreduce = those("allreduce_")
    bounded = {name: read for name, read in allreduce.items() if _bound_means_something(read)}
    lines = [[f"[{path.name}]({path.name})", _command(read)] for path, read in files.items()]
    lines += [[f"[{path.name}]({path.name})", ""] for path in sorted(RESULTS.glob("*.txt"))]
    parts = {
        "Allreduce of float32, sum: times as fast as gloo": _by_size(
            allreduce, lambda rows: _speedups(rows, "gloo")
        ),
        "The same: times as fast as Open MPI, which is called without torch": _by_size(
            allreduce, lambda rows: _speedups(rows, "openmpi")
        ),
        "The same: % of the bound's speed (only where the ranks of a node have a core each)": (
            _by_size(bounded, _shares, 256 << 10)
        ),
        "Other collectives at their largest size: times as fast as gloo": _largest(those("all_")),
        "Training steps: multiples of a step without communication (`fake`: DDP alone)": (
            _training(those("ddp_"))
        ),
        "Pipelines of stages that sleep: % of the bound, by microbatches, for smp / "
        "torch.distributed.pipelining / its Interleaved1F1B": _pipelines(those("pipeline_ranks")),
        "Sharded data parallelism of layers that sleep: speed without sharding = 1": (
            _sleeping(those("sharding_sleep_"))
        ),
        "Sharded data parallelism of a transformer beside FSDP2": (
            _sharding(those("sharding_transformer_"))
        ),
        "Tensor parallelism: a transformer block by bytes of activations: ms "
        "(times that of smp over smddp)": _blocks(those("tensor_block_")),
        "Steps of Keras with 2 ranks, by bytes of gradients (`alone`: one rank's share without the "
        "other)": _tensorflow(those("tensorflow_")),
        "An operation of TensorFlow on 4 bytes, in eager code": _operations(those("tensorflow_")),
        "A call of a module on another rank, 4 KiB there and back: µs": _calls(
            those("pipeline_calls_")
        ),
        "Starting 4 ranks that have imported torch, until the last has its first result: ms": (
            _startup(those("startup_"))
        ),
        "Files and the arguments they were made with": _table(["file", "arguments"], lines),
    }
    return "\n".join([HEAD, *(f"## {title}\n\n{text}" for title, text in parts.items())])


if __name__ == "__main__":
    PAGE.write_text(summary())
