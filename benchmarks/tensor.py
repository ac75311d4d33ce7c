"""Measures tensor parallelism: a transformer block beside torch's, and what it costs in a pipeline.

    python benchmarks/tensor.py block --ranks 2 4 --steps 20 --json FILE
    python benchmarks/tensor.py sleep --ranks 2 --json FILE

`block` runs one block of a transformer forward and backward, in a step of smp and under
`torch.distributed.tensor.parallel.parallelize_module`, both over smddp and over gloo. All ranks
have the same examples, so each variant exchanges activations by four sums. It prints the time of a
step by the bytes of the activations.

`sleep` trains a pipeline of layers that are divided and sleep, so that many ranks fit on few cores.
It divides the time of a step of the pipeline alone by that with tensor parallelism: 1.0 means that
the exchanges cost nothing.

The variants take turns, as interleaved.py says.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from interleaved import Sleep, add_arguments, measure, parsed, write
from torch import Tensor, nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import smdistributed.modelparallel.torch as smp


class Layer(nn.Module):
    """A divided layer, whose time is that of a sleep."""

    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.linear = smp.nn.DistributedLinear(width, width)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        """Returns a matrix of the shape of `x`."""
        result: Tensor = Sleep.apply(self.linear(x), self.seconds)
        return result


class Block(nn.Module):
    """A transformer block in plain torch, for `parallelize_module`.

    The rows of `qkv` are the query, the key and the value of one head after the other. So a rank
    that has a part of the rows has some of the heads.
    """

    def __init__(self, width: int, head: int) -> None:
        super().__init__()
        self.head = head
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Returns a tensor of the shape of `x`, [B, S, width]."""
        parts = self.qkv(self.norms[0](x)).unflatten(-1, (-1, 3, self.head)).transpose(1, 2)
        y = nn.functional.scaled_dot_product_attention(*parts.unbind(3))
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.down(nn.functional.gelu(self.up(self.norms[1](x))))
        return x + y


def torch_step(options: Any, x: Tensor) -> Callable[[], None]:
    """Returns a function that runs the block under `parallelize_module`."""
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {
        "qkv": ColwiseParallel(),
        "out": RowwiseParallel(),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
    }
    model = parallelize_module(Block(options.width, options.width // options.heads), mesh, plan)

    def step() -> None:
        model.zero_grad()
        model(x).square().mean().backward()

    return step


@smp.step
def train_block(model: Any, x: Tensor) -> Any:
    """One step with the block."""
    loss = model((x, None))[0].square().mean()
    model.backward(loss)
    return loss


def block_step(options: Any, x: Tensor) -> Callable[[], None]:
    """Returns a function that runs the block under smp."""
    smp.init(
        {
            "partitions": 1,
            "microbatches": 1,
            "tensor_parallel_degree": dist.get_world_size(),
            "prescaled_batch": True,
            "ddp": True,
        }
    )
    model = smp.DistributedModel(
        smp.nn.DistributedTransformerLayer(
            num_attention_heads=options.heads,
            attention_head_size=options.width // options.heads,
            hidden_size=options.width,
            intermediate_size=4 * options.width,
            attention_dropout_prob=0.0,
            hidden_dropout_prob=0.0,
            pre_layernorm=True,
            post_layernorm=False,
        )
    )

    def step() -> None:
        model.zero_grad()
        train_block(model, x)

    return step


@smp.step
def train_layers(model: Any, x: Tensor) -> Any:
    """One step with the layers that sleep."""
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


def sleep_step(options: Any, degree: int) -> Callable[[], None]:
    """Returns a function that trains the layers that sleep."""
    smp.init(
        {
            "partitions": options.partitions,
            "microbatches": options.microbatches,
            "tensor_parallel_degree": degree,
            "ddp": True,
            "auto_partition": False,
            "default_partition": 0,
        }
    )
    layers = [Layer(options.width, options.seconds) for _ in range(options.layers)]
    model = smp.DistributedModel(nn.Sequential(*layers))
    for number, layer in enumerate(layers):
        smp.set_partition(layer, number * options.partitions // options.layers)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-4))
    x = torch.randn(options.batch, options.length, options.width)

    def step() -> None:
        optimizer.zero_grad()
        train_layers(model, x)
        optimizer.step()

    return step


def make_step(options: Any, variant: dict[str, Any]) -> Callable[[], None]:
    """Returns a function that runs one step of a variant."""
    torch.manual_seed(0)
    if variant["kind"] == "sleep":
        return sleep_step(options, variant["degree"])
    examples = variant["bytes"] // (4 * options.length * options.width)
    x = torch.randn(examples, options.length, options.width, requires_grad=True)
    make = block_step if variant["kind"] == "block" else torch_step
    return make(options, x)


def measure_block(options: Any, degree: int, size: int) -> list[dict[str, Any]]:
    """Measures one block on `degree` ranks, with activations of `size` bytes."""
    kinds = {"smp": "block", "parallelize_module": "torch"}
    variants = {
        f"{who} over {backend}": {
            "kind": kind,
            "backend": backend,
            "ranks": degree,
            "bytes": size,
        }
        for who, kind in kinds.items()
        for backend in ("smddp", "gloo")
    }
    found = measure(make_step, options, variants)
    for row in found:
        row["bytes"] = size
        row["of_smp"] = row["step_ms"] / found[0]["step_ms"]
        print(
            f"{degree} ranks, {size >> 10:4} KiB, {row['variant']:29}: {row['step_ms']:7.2f} ms "
            f"({row['of_smp']:.2f} of smp's over smddp), processor {row['processor_ms']:7.2f} ms",
            flush=True,
        )
    return found


def measure_sleep(options: Any, degree: int) -> list[dict[str, Any]]:
    """Measures the pipeline alone, and with tensor parallelism."""
    variants = {
        name: {
            "kind": "sleep",
            "backend": "smddp",
            "ranks": ranks * options.partitions,
            "degree": ranks,
        }
        for name, ranks in (("pipeline", 1), ("divided", degree))
    }
    found = measure(make_step, options, variants)
    ratio = found[0]["step_ms"] / found[1]["step_ms"]
    print(
        f"degree {degree}, {options.partitions} partitions: {found[0]['step_ms']:.1f} ms alone, "
        f"{found[1]['step_ms']:.1f} ms with tensor parallelism: {ratio:.3f}",
        flush=True,
    )
    return [{"partitions": options.partitions, "ratio": ratio, **row} for row in found]


def main() -> None:
    """Parses the arguments, measures, and prints."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["block", "sleep"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="of a tp group")
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--length", type=int, default=16, help="of a sequence")
    parser.add_argument(
        "--kib", type=int, nargs="+", default=[4, 32, 256, 1024], help="of activations; block"
    )
    parser.add_argument("--partitions", type=int, default=2, help="this and the following: sleep")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=0.025, help="of each sleep")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=4)
    add_arguments(parser)
    options = parsed(parser)
    rows = []
    for degree in options.ranks:
        if options.what == "sleep":
            rows += measure_sleep(options, degree)
            continue
        for kib in options.kib:
            rows += measure_block(options, degree, kib << 10)
    write(options, rows)


if __name__ == "__main__":
    main()
