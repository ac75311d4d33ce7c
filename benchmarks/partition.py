"""Measures the time to partition a model, phase by phase.

    python benchmarks/partition.py [MODULES [PARTS]]

The model is a stack of residual blocks with about MODULES modules.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from torch import nn

from smddp.modelparallel.core.solver import bottleneck, divide_exactly, divide_tree
from smddp.modelparallel.torch.partition.trace import trace_model
from smddp.modelparallel.torch.partition.units import Units
from smddp.modelparallel.torch.pipeline.modules import Modules

RUNS = 5


class Block(nn.Module):
    """Seven modules, five of them with parameters."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
        self.gate = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the input with a correction."""
        return x + self.mlp(self.norm(x)) * torch.sigmoid(self.gate(x))


def main() -> None:
    """Prints the median time of each phase."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    parts = int(sys.argv[2]) if len(sys.argv) > 2 else 8
    # The blocks have different costs, so equal numbers of blocks are not equal shares.
    blocks = [Block(64, 64 * (1 + number % 5)) for number in range((count + 5) // 7)]
    model = nn.Sequential(*blocks)
    modules = Modules(model, 0)
    x = torch.zeros(4, 64)
    seconds: dict[str, list[float]] = {}

    def timed(name: str, function: Any) -> Any:
        begun = time.perf_counter()
        result = function()
        seconds.setdefault(name, []).append(time.perf_counter() - begun)
        return result

    for _ in range(RUNS):
        trace = timed("trace", lambda: trace_model(model, (x,), {}, False))
        units = timed("units", lambda trace=trace: Units(modules, trace, 0.5))
        starts = timed("exact", lambda u=units: divide_exactly(u.costs, u.cuts, parts))
        timed("tree", lambda u=units: divide_tree(u.tree(), parts))
    print(f"{len(modules.by_number)} modules, {len(units.costs)} units, {parts} parts, {trace.how}")
    for name, values in seconds.items():
        print(f"{name:>6}  {1e3 * sorted(values)[RUNS // 2]:8.1f} ms")
    share = bottleneck(units.costs, units.cuts, starts) * parts
    print(f"largest part: {share:.4f} of an equal share, price of its borders included")


if __name__ == "__main__":
    main()
