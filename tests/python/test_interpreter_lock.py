"""Python's interpreter lock (GIL) and the engine: neither waits for the other."""

from __future__ import annotations

import gc
import os
import re
import threading

import pytest
import ranks
import torch
import torch.distributed as dist
from on_ranks import on_ranks

import smddp

ROUNDS = 1500 if "ALL_SEEDS" in os.environ else 500


@pytest.mark.multiprocess
@pytest.mark.parametrize("layout", ["2", "1+1"])
@on_ranks("{layout}")
def test_tensors_are_freed_while_others_wait_for_the_engine(layout: str) -> None:
    """The engine frees tensors, which takes the GIL, while a thread with the GIL calls it."""
    dist.init_process_group("smddp")
    over = threading.Event()

    def allocate() -> None:
        while not over.is_set():
            smddp.empty(100)

    def make_and_free_groups() -> None:
        # Torch frees the group with the GIL, and the destructor waits for the engine.
        for _ in range(20):
            group = dist.new_group(backend="smddp")
            del group
            gc.collect()

    helper = threading.Thread(target=allocate, daemon=True)
    helper.start()
    for _ in range(ROUNDS):
        # Nobody but the operation holds this tensor, whose Python object is freed with the GIL.
        dist.all_reduce(torch.ones(2000), async_op=True)
        dist.isend(torch.ones(10), (dist.get_rank() + 1) % 2)
        dist.recv(torch.empty(10), (dist.get_rank() + 1) % 2)
    make_and_free_groups()
    over.set()
    helper.join()
    dist.destroy_process_group()


def test_no_factory_has_the_guard_that_releases_the_lock() -> None:
    """Pybind11 would then enter new objects into its table without the GIL."""
    for file in (ranks.ROOT / "csrc" / "bindings").glob("*.cc"):
        for definition in re.split(r"\.def\(|\bm\.def\(", file.read_text())[1:]:
            # Up to the end of this definition; what comes behind may have a guard.
            text = definition.split(";\n  m.")[0]
            if text.startswith("py::init("):
                assert not re.search(r"Release\(\)|call_guard", text), f"{file.name}: {text[:200]}"
