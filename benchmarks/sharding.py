"""Measures sharded data parallelism: what it costs, and how it compares with FSDP2.

    python benchmarks/sharding.py sleep --ranks 2 4 --partitions 1 2 --json FILE
    python benchmarks/sharding.py transformer --ranks 2 4 --json FILE

`sleep` trains layers that sleep in place of computing, so that many ranks fit on few cores. It
divides the time of a step without sharding by that with sharding: 1.0 means that all gathers and
sums are hidden behind the layers.

`transformer` trains an encoder under smp and under `torch.distributed.fsdp.fully_shard`, where each
layer of the encoder is one group of parameters, over smddp and over gloo. It prints the time of a
step, the processor time of a rank in a step, and the most memory that tensors of a rank have
taken at any moment of a step: of all storages that exist then, also those of parameters, gradients
and the optimizer.

All variants are jobs of their own that exist at the same time, and take turns of a few steps. Each
figure is a median over all steps of all turns; a step takes as long as its slowest rank.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from interleaved import Sleep, add_arguments, measure, parsed, write
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import smdistributed.modelparallel.torch as smp
from smddp.modelparallel.torch.optimizer.clipping import clip_grad_norm


class Storages(TorchDispatchMode):
    """Follows which storages exist, and how many bytes they have together at most."""

    def __init__(self) -> None:
        super().__init__()
        self._found: dict[int, weakref.ref[Any]] = {}
        self.peak = 0
        for thing in gc.get_objects():
            if issubclass(type(thing), torch.Tensor):
                self._note(thing)

    def _note(self, tensor: torch.Tensor) -> None:
        with contextlib.suppress(RuntimeError, NotImplementedError):
            storage = tensor.untyped_storage()
            key = storage._cdata
            if tensor.device.type == "cpu" and key not in self._found:
                self._found[key] = weakref.ref(storage, lambda _: self._found.pop(key, None))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls an operator, and looks at what there is."""
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self._note(value)
        storages = [reference() for reference in list(self._found.values())]
        self.peak = max(self.peak, sum(one.nbytes() for one in storages if one is not None))
        return result


# In the body of a step, which runs on a thread of its own: what looks at it.
watcher: Storages | None = None


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """In this context the watcher follows the calling thread."""
    with watcher if watcher is not None else contextlib.nullcontext():
        yield


class Layer(nn.Module):
    """A layer with a matrix, whose time is that of a sleep."""

    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns a matrix of the shape of `x`."""
        result: torch.Tensor = Sleep.apply(self.linear(x), self.seconds)
        return result


def layers(options: Any) -> nn.Sequential:
    """Makes the layers that sleep."""
    return nn.Sequential(*[Layer(options.width, options.seconds) for _ in range(options.layers)])


def encoder(options: Any) -> nn.Sequential:
    """Makes the transformer."""
    return nn.Sequential(
        *[
            nn.TransformerEncoderLayer(
                options.width, 4, 4 * options.width, dropout=0.0, batch_first=True
            )
            for _ in range(options.layers)
        ]
    )


@smp.step
def train_step(model: Any, x: torch.Tensor) -> Any:
    """One training step."""
    with watched():
        loss = model(x).square().mean()
        model.backward(loss)
        return loss


def smp_step(options: Any, variant: dict[str, Any], x: torch.Tensor) -> Callable[[], None]:
    """Returns a function that runs one step under smp."""
    partitions = variant.get("partitions", 1)
    config: dict[str, Any] = {
        "ddp": True,
        "partitions": partitions,
        "microbatches": options.microbatches,
        "auto_partition": False,
        "default_partition": 0,
    }
    if variant["degree"] > 1:
        config["sharded_data_parallel_degree"] = variant["degree"]
        config["sdp_param_persistence_threshold"] = options.width * 8
        config["sdp_gradient_clipping"] = 1e9
    smp.init(config)
    module = encoder(options) if options.what == "transformer" else layers(options)
    model = smp.DistributedModel(module)
    if partitions > 1:
        for number, part in enumerate(module):
            smp.set_partition(part, number * partitions // len(module))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9))

    def step() -> None:
        optimizer.zero_grad()
        train_step(model, x)
        if variant["degree"] == 1:
            clip_grad_norm(1e9)  # optimizer.step() does so where parameters are divided
        optimizer.step()

    return step


def fsdp_step(options: Any, variant: dict[str, Any], x: torch.Tensor) -> Callable[[], None]:
    """Returns a function that runs one step under FSDP2."""
    model = encoder(options)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for part in model:
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        with watched():
            model(x).square().mean().backward()
        optimizer.step()

    return step


def memory(step: Callable[[], None]) -> float:
    """Runs a step; returns how many MiB there were at most."""
    global watcher
    watcher = Storages()
    step()
    peak, watcher = watcher.peak, None
    return peak / 2**20


def make_step(options: Any, variant: dict[str, Any]) -> Callable[[], None]:
    """Returns a function that runs one step of a variant."""
    torch.manual_seed(0)
    x = torch.randn(options.batch, options.length, options.width)
    make = fsdp_step if variant["kind"] == "fsdp" else smp_step
    return make(options, variant, x)


def main() -> None:
    """Parses the arguments, measures, and prints."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["sleep", "transformer"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="of a replica group")
    parser.add_argument("--partitions", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=0.025, help="of each sleep")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--microbatches", type=int, help="default 4; of the transformer, 1")
    add_arguments(parser)
    options = parsed(parser)
    if options.microbatches is None:
        options.microbatches = 4 if options.what == "sleep" else 1
    options.batch = max(options.batch, options.microbatches)
    rows = []
    variants: dict[str, dict[str, Any]]
    for degree in options.ranks:
        if options.what == "transformer":
            variants = {
                "smp over smddp": {"kind": "smp", "backend": "smddp", "degree": degree},
                "FSDP2 over smddp": {"kind": "fsdp", "backend": "smddp"},
                "FSDP2 over gloo": {"kind": "fsdp", "backend": "gloo"},
            }
            for variant in variants.values():
                variant["ranks"] = degree
            found = measure(make_step, options, variants, peak_mib=memory)
            for row in found:
                row["of_smp"] = row["step_ms"] / found[0]["step_ms"]
                print(
                    f"{degree} ranks, {row['variant']:17}: step {row['step_ms']:7.1f} ms "
                    f"({row['of_smp']:.2f} of smp's), processor {row['processor_ms']:7.1f} ms, "
                    f"memory {row['peak_mib']:6.1f} MiB",
                    flush=True,
                )
            rows += found
            continue
        for partitions in options.partitions:
            common = {"kind": "smp", "backend": "smddp", "partitions": partitions}
            common["ranks"] = degree * partitions
            variants = {"whole": {**common, "degree": 1}, "sharded": {**common, "degree": degree}}
            found = measure(make_step, options, variants)
            ratio = found[0]["step_ms"] / found[1]["step_ms"]
            print(
                f"degree {degree}, {partitions} partition(s): {found[0]['step_ms']:.1f} ms whole, "
                f"{found[1]['step_ms']:.1f} ms sharded: {ratio:.3f}",
                flush=True,
            )
            for row in found:
                rows.append({"partitions": partitions, "ratio": ratio, **row})
    write(options, rows)


if __name__ == "__main__":
    main()
