"""Models made at random, divided at random: the same losses and gradients as in one process.

Each module's forward is a short random program over its children: calls, skips, results that are
dropped or detached, checkpoints, control flow that depends on data, nested structures. Others write
to objects that they get, and have hooks that collect what they return. The oracle
is one partition, which test_transparency.py compares with plain torch.
"""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import gc
import os
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from ranks import check_ranks, rotating
from smp.common import Adjoint, squares
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import smdistributed.modelparallel.torch as smp
from smddp.modelparallel.torch.activations import offload

pytestmark = pytest.mark.multiprocess

WIDTH, STEPS = 4, 3
# Models with seeds from here on differentiate twice, and call modules in backward passes.
DERIVATIVES = 100
# partitions, microbatches, active, pipeline, direct forwarding, share of modules that get
# activation checkpointing after the first step
LAYOUTS = [
    (2, 4, 2, "interleaved", True, 0.0),
    (3, 8, 1, "interleaved", True, 0.7),
    (2, 8, 3, "simple", True, 0.4),
    (4, 8, 6, "interleaved", True, 0.0),
    (3, 4, 3, "interleaved", False, 0.4),
]


class Leaf(nn.Module):
    """One layer, which may use a second argument, draw random numbers, or return a structure."""

    # Makes some calls late, so that ranks reach their tasks in different orders.
    pause: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, source: random.Random, more: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        kinds = ["plain", "second", "dropout", "structure", *["statistics"] * more]
        self.kind = source.choice(kinds)
        if self.kind == "statistics":
            self.norm = nn.BatchNorm1d(WIDTH, momentum=0.4)
        if self.kind == "dropout":
            self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor, second: Tensor | None = None) -> Any:
        self.pause()
        y = torch.tanh(self.linear(x))
        if self.kind == "statistics":
            self.norm(y.detach())  # depends on the order of calls
        if self.kind == "second" and second is not None:
            y = y + second
        if self.kind == "dropout":
            y = self.dropout(y)
        return (y, {"none": None, "twice": y * 2}) if self.kind == "structure" else y


class Meter(nn.Module):
    """Remembers the largest number that it has seen. Its result is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.tensor(-torch.inf))

    def forward(self, x: Tensor) -> Tensor:
        # The order of microbatches does not matter, nor does a checkpoint that computes it again.
        self.largest.copy_(torch.maximum(self.largest, x.detach().amax()))
        return x


class Node(nn.Module):
    """Runs a random program."""

    OPERATIONS = (
        *["call"] * 4,
        *["second", "dropped", "no_grad", "checkpoint", "reentrant", "residual"],
        *["detached", "condition", "stateless", "in place"],
    )
    MORE = *["call", "residual", "condition", "checkpoint"], *["adjoint", "twice"] * 3

    def __init__(self, source: random.Random, depth: int, operations: Any = OPERATIONS) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            Leaf(source, operations is Node.MORE)
            if depth == 0 or source.random() < 0.5
            else Node(source, depth - 1, operations)
            for _ in range(source.randint(1, 4))
        )
        if source.random() < 0.3:
            self.scale = nn.Parameter(torch.ones(WIDTH))
        self.relu = nn.ReLU()
        self.meter = Meter()
        self.measures_result = source.random() < 0.5
        self.program = [
            (source.choice(operations), source.randrange(len(self.parts)), source.random())
            for _ in range(source.randint(1, 5))
        ]

    def run(self, part: int, *args: Tensor) -> Tensor:
        result = self.parts[part](*args)
        return result[0] if isinstance(result, tuple) else result

    def forward(self, x: Tensor, second: Tensor | None = None) -> Tensor:
        values = [x]
        for operation, part, choice in self.program:
            old = values[int(choice * len(values))] if choice < 0.5 else values[-1]
            new = self.apply_operation(operation, part, old, x)
            values.append(new * self.scale if hasattr(self, "scale") else new)
        if self.measures_result:
            self.meter(values[-1] + 0)  # nothing comes after this call
        return values[-1]

    def apply_operation(self, operation: str, part: int, old: Tensor, first: Tensor) -> Tensor:
        if operation == "call":
            return self.run(part, old)
        if operation == "second":
            return self.run(part, old, first)
        if operation == "dropped":
            self.parts[part](old)
            self.meter(old)
            return old * 1.1
        if operation == "no_grad":
            with torch.no_grad():
                return_value = self.run(part, old)
            return return_value + old
        if operation in ("checkpoint", "reentrant"):
            if any(isinstance(one, nn.BatchNorm1d) for one in self.parts[part].modules()):
                return self.run(part, old)  # it would count what is computed again, too
            again = operation == "reentrant"
            return checkpoint(self.run, part, old, use_reentrant=again)  # type: ignore[no-any-return]
        if operation == "residual":
            return old + self.run(part, old)
        if operation == "adjoint":
            draws = any(isinstance(one, nn.Dropout) for one in self.parts[part].modules())
            if draws or not torch.is_grad_enabled():
                return self.run(part, old)
            run = functools.partial(self.run, part)
            return Adjoint.apply(run, old, *self.parts[part].parameters())  # type: ignore[no-any-return]
        if operation == "twice":
            if not torch.is_grad_enabled():
                return self.run(part, old)
            old = old if old.requires_grad else old.detach().requires_grad_()
            new = self.run(part, old)
            of = {"create_graph": True, "allow_unused": True}
            (slope,) = torch.autograd.grad(new.sum(), old, **of)
            return new if slope is None else new + slope * 0.3
        if operation == "detached":
            return self.run(part, old.detach()) + old
        if operation == "condition":
            return self.run(part, old) if float(old.detach().sum()) > 0 else old - 0.1
        if operation == "stateless":
            return self.relu(old) + torch.sin(old)
        return (self.run(part, old) + 0).mul_(0.9)  # in place


class Box:
    """What layers write to, in place of returning it."""

    def __init__(self) -> None:
        self.list: list[Any] = []
        self.table: dict[str, Any] = {}
        self.inner: Box | None = None
        self.last: Any = None
        self.calls = 0
        self.running = torch.zeros(WIDTH)

    def total(self) -> Tensor:
        """Returns a number that depends on all that it holds."""
        tensors = [*self.list, *self.table.values(), self.running]
        found = sum(tensor.square().mean() for tensor in tensors) + torch.tensor(float(self.calls))
        return found + self.inner.total() if self.inner is not None else found


@dataclasses.dataclass
class Notes:
    """A dataclass for the same."""

    sum: Tensor
    seen: list[Tensor]


collector: contextvars.ContextVar[list[Tensor] | None] = contextvars.ContextVar(
    "collector", default=None
)


def collect(module: nn.Module, args: Any, result: Any) -> None:
    """A forward hook, for a collector of the code that calls the model."""
    found = collector.get()
    if found is not None:
        found.append(result.mean())


class Writer(nn.Module):
    """Writes to its arguments as a random program says, and calls others with them."""

    WAYS = ("append", "entry", "attribute", "inner", "in place", "pop", "replace", "notes", "count")

    def __init__(self, source: random.Random, depth: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.ways = source.choices(self.WAYS, k=source.randint(0, 3))
        count = source.randint(1, 3) if depth > 0 else 0
        self.parts = nn.ModuleList(Writer(source, depth - 1) for _ in range(count))
        self.passes_inner = source.random() < 0.3
        if source.random() < 0.4:
            self.register_forward_hook(collect)

    def forward(self, x: Tensor, box: Box, notes: Notes, more: list[Tensor]) -> Tensor:
        y = torch.tanh(self.linear(x))
        for way in self.ways:
            self.write(way, y, box, notes, more)
        for part in self.parts:
            target = box.inner if self.passes_inner and box.inner is not None else box
            y = part(y, target, notes=notes, more=more) + y
        return y

    def write(self, way: str, y: Tensor, box: Box, notes: Notes, more: list[Tensor]) -> None:
        if way == "append":
            box.list.append(y)
            more.append(y * 2)
        elif way == "entry":
            box.table[f"entry {len(box.table) % 3}"] = y + 1
        elif way == "attribute":
            box.last = y
        elif way == "inner" and box.inner is None:
            box.inner = Box()
            box.inner.list = [y]
        elif way == "in place":
            with torch.no_grad():
                box.running += y.sum(0)
        elif way == "pop" and box.list:
            notes.seen.append(box.list.pop() * 3)
        elif way == "replace" and box.last is not None:
            box.list = [box.last, *box.list[:1]]
        elif way == "notes":
            notes.sum = notes.sum + y.mean()
        elif way == "count":
            box.calls += 1


class Collecting(nn.Module):
    """Its result depends on all that layers have written, and hooks have collected."""

    def __init__(self, source: random.Random) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Writer(source, 2) for _ in range(3))
        self.hooks_in_step = source.random() < 0.5

    def forward(self, x: Tensor) -> Tensor:
        if self.hooks_in_step and not self.parts[0]._forward_hooks:
            for part in self.parts:
                part.register_forward_hook(collect)
        box, notes, more = Box(), Notes(x.mean(), []), [x]
        kept, found = box.list, list[Tensor]()
        token = collector.set(found)
        for part in self.parts:
            x = part(x, box, notes, more)
        collector.reset(token)
        assert box.list is kept or any("replace" in getattr(m, "ways", ()) for m in self.modules())
        written = box.total() + notes.sum + sum(one.mean() for one in (*notes.seen, *more))
        return x + written + sum(found)


def make(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    source = random.Random(seed)
    if seed >= COLLECTING:
        body: nn.Module = Collecting(source)
    else:
        body = Node(source, 2, Node.OPERATIONS if seed < DERIVATIVES else Node.MORE)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), body, nn.Linear(WIDTH, 2))


def whole_gradient(model: Any, parameter: Tensor) -> Tensor | None:
    """Returns a gradient; all tensor-parallel ranks call it, and get that of a whole weight."""
    gradient = parameter.grad
    if gradient is None or not model.is_distributed_parameter(parameter):
        return gradient
    parts = [torch.empty_like(gradient) for _ in range(smp.tp_size())]
    dist.all_gather(parts, gradient, group=smp.get_tp_process_group())
    return torch.cat(parts, 1)


def trained(seeds: list[int], layout: tuple[Any, ...], degree: int = 1) -> dict[int, list[Any]]:
    """Trains models; with a degree, their linear layers are divided over tensor-parallel ranks."""
    gc.freeze()  # so that collecting a model does not visit all objects of torch
    parts, microbatches, active, pipeline, forwarding, share = layout
    if degree > 1:
        delays = random.Random(os.getpid())
        Leaf.pause = staticmethod(lambda: time.sleep(delays.random() * 1e-3))
    smp.init({
        "partitions": parts, "microbatches": microbatches, "active_microbatches": active,
        "pipeline": pipeline, "direct_forwarding": forwarding, "ddp": True,
        "auto_partition": False, "default_partition": 0, "activation_loading_horizon": 1,
        "offload_activations": 0 < share < 0.5, "tensor_parallel_degree": degree,
        "prescaled_batch": True, "_match_weights": True,
    })  # fmt: skip
    offload.SMALL = 0
    results: dict[int, list[Any]] = {}
    for seed in seeds:
        with smp.tensor_parallelism():
            module = make(seed)
        model = smp.DistributedModel(module)
        source = random.Random(1000 + seed)
        for part in list(module.modules())[1:]:
            if source.random() < 0.6:
                smp.set_partition(part, source.randrange(parts))
        results[seed] = []
        for step in range(STEPS):
            for part in list(module.modules()) if step > 0 else []:
                modules = model.runtime.executor.modules
                owners = {modules.owners[modules.number_of(one)] for one in part.modules()}
                called = not isinstance(part, nn.ModuleList)
                if len(owners - {None}) <= 1 and source.random() < share and called:
                    smp.set_activation_checkpointing(part)
            for parameter in module.parameters():
                parameter.grad = None
            generator = torch.Generator().manual_seed(100 * seed + step)
            x = torch.randn(2 * microbatches, WIDTH, generator=generator)
            torch.manual_seed(step)
            losses = [float(loss) for loss in squares(model, x).outputs]
            grads = {name: whole_gradient(model, p) for name, p in model.local_named_parameters()}
            buffers = {name: buffer.clone() for name, buffer in model.local_named_buffers()}
            results[seed].append((losses, grads, buffers))
        del model, module, part
        gc.collect()
    return results


# Seeds from here on are for models whose layers write to their arguments.
COLLECTING = 1000
WRITERS = list(range(COLLECTING, COLLECTING + 12))
WRITING = [
    (2, 4, 2, "interleaved", True, 0.0),
    (3, 4, 3, "interleaved", False, 0.0),
    (3, 4, 4, "simple", True, 0.0),
]

# In 34 a gradient is missing: a module has detached what another rank has made of a parameter.
FEW = [3, 7, 34, 111]
MANY = [*range(20, 32), *range(100, 112)]


# Layers that are divided over tensor-parallel ranks have no second derivatives; torch says so.
ONCE = [seed for seed in (*FEW, *MANY) if seed < DERIVATIVES]
# As LAYOUTS, for two tensor-parallel ranks each.
DIVIDED = [
    (2, 4, 2, "interleaved", True, 0.4),
    (2, 8, 6, "simple", True, 0.0),
    (3, 8, 5, "interleaved", False, 0.7),
]


@pytest.mark.parametrize(
    ("seeds", "degree", "layouts"),
    [
        (FEW, 1, LAYOUTS),
        pytest.param(rotating(MANY, 3), 1, LAYOUTS),
        pytest.param(MANY, 1, LAYOUTS, marks=pytest.mark.exhaustive),
        pytest.param(rotating(WRITERS, 3), 1, WRITING[:2]),
        pytest.param(WRITERS, 1, WRITING, marks=pytest.mark.exhaustive),
        (ONCE[:3], 2, DIVIDED[:1]),
        pytest.param(ONCE, 2, DIVIDED, marks=pytest.mark.exhaustive),
    ],
    ids=[
        "few",
        "turn",
        "many",
        "writers",
        "all writers",
        "few, tensor-parallel",
        "many, tensor-parallel",
    ],
)
@pytest.mark.timeout(400)
def test_random_models_divided_at_random(
    seeds: list[int], degree: int, layouts: list[tuple[Any, ...]]
) -> None:
    whole = {
        count: check_ranks(trained, "1", seeds, (1, count, 4, "interleaved", True, 0.0))[0]
        for count in {layout[1] for layout in layouts}
    }
    for layout in layouts:
        ranks = check_ranks(trained, str(degree * layout[0]), seeds, layout, degree, timeout=200)
        for seed in seeds:
            for step, (losses, *tensors) in enumerate(whole[layout[1]][seed]):
                where = f"seed {seed}, step {step}, {layout}"
                for rank in ranks:
                    assert rank[seed][step][0] == pytest.approx(losses, abs=1e-6), where
                for kind, expected in enumerate(tensors, 1):
                    found: dict[str, Any] = {}
                    for rank in ranks:
                        found.update(rank[seed][step][kind])
                    torch.testing.assert_close(
                        *(found, expected),
                        rtol=1e-4,
                        atol=1e-6,
                        msg=lambda text, where=where: f"{where}: {text}",
                    )
