"""Rules that only make steps faster: no result shows that they are missing, so counts do."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import check_ranks
from smp.common import BY_HAND, squares
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp

pytestmark = pytest.mark.multiprocess

ACTIVE = 5


def wait_for(file: Path, size: int) -> None:
    """Waits until a file has so many bytes, for 20 seconds at most."""
    deadline = time.monotonic() + 20
    while file.stat().st_size < size and time.monotonic() < deadline:
        time.sleep(0.01)


class Counted(nn.Module):
    """Counts its calls in a file, and those whose backward pass has not come."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.linear, self.file = nn.Linear(4, 4), file
        # Calls; those under way; the most of these. An array, because smp does not see its changes:
        # of a list it would say that microbatches share it, and run them one after the other.
        self.counts = np.zeros(3, int)

    def forward(self, x: Tensor) -> Tensor:
        """Returns a tensor of the shape of x."""
        with self.file.open("ab") as file:
            file.write(b".")
        self.counts[:2] += 1
        self.counts[2] = self.counts[1:].max()
        y = self.linear(x)
        y.register_hook(self.returned)
        return y  # type: ignore[no-any-return]

    def returned(self, _: Tensor) -> None:
        """Takes note of a backward pass."""
        self.counts[1] -= 1


class First(Counted):
    """Lets its first call wait until the other rank has begun all active microbatches."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns a tensor of the shape of x."""
        if self.counts[0] == 0:
            wait_for(self.file.with_name("root"), ACTIVE)
        return super().forward(x)


class Root(Counted):
    """Lets its first call wait, with its results, until the parts have begun what they may."""

    def __init__(self, folder: Path, most: tuple[int, int]) -> None:
        super().__init__(folder / "root")
        self.parts = nn.ModuleList([First(folder / "first"), Counted(folder / "second")])
        self.most = most

    def forward(self, x: Tensor) -> Tensor:
        """Returns a tensor of the shape of x."""
        y = super().forward(x)
        is_first = self.counts[0] == 1
        for part in self.parts:
            y = part(y)
        y.sum().item()  # waits for the value; other microbatches begin meanwhile
        if is_first:
            for part, most in zip(self.parts, self.most, strict=True):
                wait_for(part.file, most)  # type: ignore[arg-type]
            time.sleep(0.1)  # in which the parts would begin more
        return y


def under_way(pipeline: str, folder: Path, most: tuple[int, int]) -> list[int]:
    """Returns how many microbatches were under way at most in the parts, as far as known here."""
    smp.init(
        {
            "partitions": 3, "microbatches": 10, "active_microbatches": ACTIVE,
            "pipeline": pipeline, **BY_HAND,
        }
    )  # fmt: skip
    module = Root(folder, most)
    counted = [module, *module.parts]
    model = smp.DistributedModel(module)
    for rank, part in enumerate(module.parts, 1):
        smp.set_partition(part, rank)
    x = torch.ones(20, 4)
    for number in range(3):  # the first two are watched: their microbatches do not overlap
        for one in counted:
            one.counts[:] = [number < 2, 0, 0]  # type: ignore[index]
            one.file.write_bytes(b"")  # type: ignore[union-attr,operator]
        smp.barrier()
        squares(model, x)
    return [int(part.counts[2]) for part in module.parts]  # type: ignore[index]


@pytest.mark.parametrize(("pipeline", "most"), [("interleaved", (4, 3)), ("simple", (5, 5))])
def test_fewer_microbatches_are_under_way_on_later_ranks(
    pipeline: str, most: tuple[int, int], tmp_path: Path
) -> None:
    found = check_ranks(under_way, "3", pipeline, tmp_path, most)
    assert (found[1][0], found[2][1]) == most


class Detour(nn.Module):
    """Three equal parts; between two of them comes code of this module."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.parts, self.after = nn.ModuleList(nn.Linear(64, 64) for _ in range(3)), after

    def forward(self, x: Tensor) -> Tensor:
        """Returns a tensor of the shape of x."""
        for number, part in enumerate(self.parts):
            x = part(x)
            if number == self.after:
                x = x * 2
        return x


def owners(after: int) -> list[int]:
    """Returns the partitions of the parts, as smp has chosen them."""
    smp.init({"partitions": 2, "microbatches": 2, "use_times": False})
    module = Detour(after)
    model = smp.DistributedModel(module)
    squares(model, torch.ones(4, 64))
    return [int(part.weight.is_meta) for part in module.parts]  # on rank 0


@pytest.mark.parametrize(("after", "expected"), [(0, [0, 0, 1]), (1, [0, 1, 1])])
def test_a_border_comes_where_values_go_straight_on(after: int, expected: list[int]) -> None:
    assert check_ranks(owners, "2", after)[0] == expected
