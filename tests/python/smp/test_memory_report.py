"""`smp.memory` and `smp.explain`: what ranks need is near what is predicted."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch._dynamo  # takes seconds; the first optimizer would import it, in each rank
import torch.distributed as dist
import torch.nn.functional as F
from ranks import check_ranks, listen
from smp.census import Census, Highest, counting_tasks, give_back_at_once, resident
from smp.common import sums
from smp.test_sharding_array import covering
from smp.zoo import Block as Layer
from smp.zoo import Residual
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp
from smddp.modelparallel.core.errors import SMPInitializationError, SMPPeerError, SMPUsageError
from smddp.modelparallel.torch.footprint.advice import bytes_of
from smddp.modelparallel.torch.job import meeting

pytestmark = pytest.mark.multiprocess

WORDS, LENGTH, ROWS = 300, 32, 4
FIRST, LATER, UPDATE = "first step", "step", "optimizer.step"


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        result: Tensor = x + self.mlp(self.norm2(x))
        return result


class GPT(nn.Module):
    """Some MB, most of them in the blocks."""

    def __init__(self, width: int = 96, layers: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, WORDS)
        self.register_buffer("scale", torch.ones(width))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) * self.scale
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(self.norm(x))
        return result


def mlp() -> nn.Module:
    layers = (nn.Sequential(nn.Linear(160, 160), nn.Tanh()) for _ in range(24))
    return nn.Sequential(nn.Embedding(WORDS, 160), *layers, nn.Linear(160, WORDS))


def resnet() -> nn.Module:
    layers = (Residual(64) for _ in range(10))
    last = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, WORDS))
    # A channel for each word, which has an image of 8 x 8.
    first = (nn.Embedding(WORDS, 64), nn.Unflatten(2, (8, 8)), nn.Conv2d(LENGTH, 64, 1))
    return nn.Sequential(*first, *layers, *last)


class Translator(nn.Module):
    """Each layer of the decoder needs what the encoder returns."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.encoder = nn.ModuleList([Layer(width) for _ in range(3)])
        self.decoder = nn.ModuleList([Layer(width, cross=True) for _ in range(3)])
        self.head = nn.Linear(width, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        memory, x = self.embedding(ids), self.embedding(ids.flip(1))
        for layer in self.encoder:
            memory = layer(memory)[0]
        for layer in self.decoder:
            x = layer(x, memory=memory)[0]
        result: Tensor = self.head(x)
        return result


class Tied(GPT):
    """Its head and its embedding have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embedding.weight


MODELS: dict[str, Callable[..., nn.Module]] = {
    "gpt": GPT,
    "tied gpt": Tied,
    "mlp": mlp,
    "resnet": resnet,
    "translator": Translator,
}


@smp.step
def train(model: Any, ids: Tensor) -> Tensor:
    logits = model(ids)
    target = ids if logits.dim() == 3 else ids[:, 0]
    loss = F.cross_entropy(logits.reshape(-1, WORDS), target.reshape(-1))
    model.backward(loss)
    return loss


def made(
    config: dict[str, Any], checkpoints: bool, name: str = "gpt", **size: int
) -> tuple[Any, Any, Tensor]:
    """Returns a model, its optimizer and a batch."""
    smp.init(config)
    torch.manual_seed(0)
    net = MODELS[name](**size)
    if config.get("tensor_parallel_degree", 1) > 1:
        for layer in (
            net.embedding,
            *(block.mlp[number] for block in net.blocks for number in (0, 2)),
        ):
            smp.set_tensor_parallelism(layer)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    if checkpoints:
        kinds = (Block, Layer, Residual, nn.Tanh)
        for child in net.children():
            for layer in child if isinstance(child, nn.ModuleList) else [child]:
                if any(isinstance(part, kinds) for part in layer.modules()):
                    smp.set_activation_checkpointing(layer)
    rows = ROWS * config["microbatches"]
    same = smp.rdp_rank() if config.get("prescaled_batch") else smp.dp_rank()
    generator = torch.Generator().manual_seed(same)
    return model, optimizer, torch.randint(0, WORDS, (rows, LENGTH), generator=generator)


def cycle(model: Any, optimizer: Any, ids: Tensor) -> None:
    optimizer.zero_grad()
    train(model, ids)
    optimizer.step()


def counted(model: Any, optimizer: Any, ids: Tensor) -> dict[str, int]:
    """Returns the largest bytes of tensors in a step, and in the optimizer's; the oracle."""
    found = {LATER: 0, UPDATE: 0}
    with counting_tasks(model.runtime.executor.baton):
        for _ in range(2):  # in the first one it meets tensors that no operation touches later
            with Census():
                optimizer.zero_grad()
                Census.peak = 0
                train(model, ids)
                found[LATER] = max(found[LATER], Census.peak)
                Census.peak = 0
                optimizer.step()
                found[UPDATE] = max(found[UPDATE], Census.peak)
    return found


def compared(config: dict[str, Any], checkpoints: bool, name: str = "gpt") -> Any:
    """Returns the report, the oracle's counts, and a prediction from before the first step."""
    model, optimizer, ids = made(config, checkpoints, name)
    early = smp.memory(ids[:ROWS])
    with smp.memory() as beginning:
        cycle(model, optimizer, ids)
    # The same steps: in another one, offloaded tensors may move a moment earlier or later.
    with smp.memory() as report:
        oracle = counted(model, optimizer, ids)
    assert model.runtime.executor.baton.watch is None
    return (early.ranks, beginning.ranks, report.ranks, oracle, str(report), report.notes)


SIMPLE = {"microbatches": 2, "pipeline": "simple", "ddp": True}
SHARDED = {"sdp_param_persistence_threshold": 1000, "sdp_reduce_bucket_size": 100_000}
OFFLOAD = {"offload_activations": True, "activation_loading_horizon": 1}
HALF, BRAIN = {"fp16": True}, {"bf16": True}
STATE = {"shard_optimizer_state": True}
TENSOR = {"tensor_parallel_degree": 2}
SAME = {"prescaled_batch": True, **TENSOR}


def sdp(degree: int) -> dict[str, Any]:
    return {"sharded_data_parallel_degree": degree, **SHARDED}


def case(pp: int, dp: int, kind: str, *parts: dict[str, Any], slow: bool = False) -> Any:
    config = functools.reduce(lambda a, b: {**a, **b}, parts, {**SIMPLE, "partitions": pp})
    label = "-".join([f"pp{pp}-dp{dp}", kind, *(next(iter(part)) for part in parts)])
    marks = [pytest.mark.exhaustive] if slow else []
    return pytest.param(str(pp * dp), config, kind != "plain", "gpt", id=label, marks=marks)


# Pairs of: sharding off, 2 or 4; partitions; dtype; checkpoints, offloading or neither; and divided
# optimizer state or tensor parallelism, where the configuration allows it.
CASES = [
    case(1, 1, "plain"),
    case(2, 1, "checkpoints"),
    case(2, 1, "offload", HALF, OFFLOAD),
    case(1, 2, "plain", HALF, STATE),
    case(1, 2, "checkpoints", BRAIN, sdp(2)),
    case(2, 2, "plain", sdp(2)),
    case(1, 2, "plain", sdp(2), {"sdp_reduce_bucket_size": 500_000_000}),
    case(1, 4, "plain", TENSOR, STATE),
    case(1, 2, "checkpoints", SAME),
    case(1, 4, "plain", sdp(2), TENSOR),
    case(1, 4, "checkpoints", sdp(2), SAME, slow=True),
    case(2, 4, "plain", BRAIN, sdp(2), TENSOR, slow=True),
    case(2, 2, "offload", HALF, TENSOR, OFFLOAD, slow=True),
    case(2, 4, "plain", SAME, STATE, slow=True),
    case(1, 1, "offload", OFFLOAD, slow=True),
    case(2, 2, "offload", STATE, OFFLOAD, slow=True),
    case(2, 2, "checkpoints", HALF, STATE, slow=True),
    case(1, 4, "offload", HALF, sdp(4), OFFLOAD, slow=True),
    case(1, 4, "checkpoints", sdp(4), slow=True),
    case(2, 4, "plain", BRAIN, sdp(4), slow=True),
    case(2, 2, "offload", BRAIN, sdp(2), OFFLOAD, slow=True),
    case(1, 4, "plain", sdp(2), slow=True),
    case(2, 2, "plain", {"pipeline": "interleaved", "active_microbatches": 1}, slow=True),
]

# Of sharding: partitions, degree, replicas.
SHARDINGS = {"sdp2": (1, 2, 2), "sdp4": (1, 4, 4), "sdp2 x dp2": (1, 2, 4), "pp2 x sdp2": (2, 2, 2)}


def covered() -> Iterator[Any]:
    """Yields cases in which each two of sharding, dtype, activations and model come together."""
    columns = (
        list(MODELS),
        list(SHARDINGS),
        ["fp32", "bf16", "fp16"],
        ["kept", "checkpoints", "offload"],
    )
    for number, (name, sharding, dtype, kind) in enumerate(covering(*columns)):
        pp, degree, replicas = SHARDINGS[sharding]
        config = {**SIMPLE, "partitions": pp, **sdp(degree)}
        config |= {} if dtype == "fp32" else {dtype: True}
        config |= OFFLOAD if kind == "offload" else {}
        label = "-".join([name, sharding, dtype, kind])
        marks = [pytest.mark.exhaustive] if number >= 2 else []
        yield pytest.param(str(pp * replicas), config, kind != "kept", name, id=label, marks=marks)


@pytest.mark.timeout(260)
@pytest.mark.parametrize(("layout", "config", "checkpoints", "name"), [*CASES, *covered()])
@pytest.mark.costly
def test_what_is_counted_is_near_the_prediction(
    layout: str, config: dict[str, Any], checkpoints: bool, name: str
) -> None:
    everything = check_ranks(compared, layout, config, checkpoints, name, timeout=200)
    early, beginning, ranks, _, text, notes = everything[0]
    offloads = config.get("offload_activations", False)
    # It counts what may have come back from the file. With small layers it comes back later, and
    # most of what is in memory are such arguments.
    late = {"mlp": 1.5, "resnet": 1.15} if offloads and config["partitions"] > 1 else {}
    most = late.get(name, 1.1)
    # The file's thread frees tensors between the looks of report and oracle.
    close = 0.06 if offloads else 0.04
    assert not notes
    assert len(ranks) == len(everything)
    for row, rank in zip(ranks, everything, strict=True):
        oracle = rank[3]
        assert rank[4] == text  # all ranks get the same report
        for moment in (LATER, UPDATE):
            where = f"rank {row.rank}, {moment}\n{text}"
            predicted, measured = row.predicted[moment].total, row.measured[moment].total
            assert oracle[moment] > 2**20, where
            assert 0.9 * oracle[moment] <= predicted <= most * oracle[moment], (
                oracle[moment],
                where,
            )
            assert (1 - close) * oracle[moment] <= measured <= (1 + close) * oracle[moment], (
                oracle[moment],
                where,
            )
        now, later = row.now, row.predicted[LATER]
        assert (now.parameters, now.buffers) == (later.parameters, later.buffers)
        assert now.optimizer == later.optimizer
        if config["partitions"] == 1:
            assert early[row.rank].predicted == row.predicted
    if config["partitions"] == 1 and "sharded_data_parallel_degree" not in config:
        for row in beginning:
            predicted, measured = row.predicted[FIRST].total, row.measured[FIRST].total
            assert 0.9 * measured <= predicted <= 1.1 * measured, text


def process_memory(config: dict[str, Any], checkpoints: bool) -> list[tuple[int, int]]:
    """Returns for two moments what the process needs, and what tensors do.

    The moments are between steps, with malloc trimmed, and the peak of a step and an update, as it
    is predicted. Memory that ranks share, for messages, does not count.
    """
    malloc = give_back_at_once(2**16)
    model, optimizer, ids = made(config, checkpoints, width=16, layers=1)
    cycle(model, optimizer, ids)  # what torch itself needs
    smp.shutdown()
    del model, optimizer
    gc.collect()
    malloc.malloc_trim(0)
    before = resident("RssAnon")
    model, optimizer, ids = made(config, checkpoints, width=512, layers=8)
    for _ in range(2):
        cycle(model, optimizer, ids)
    gc.collect()
    malloc.malloc_trim(0)
    kept = resident("RssAnon") - before
    with Highest("RssAnon") as highest:
        cycle(model, optimizer, ids)
    row = smp.memory().ranks[smp.rank()]
    return [(kept, row.now.total), (highest.most - before, row.needed)]


@pytest.mark.parametrize(
    ("config", "checkpoints"),
    [
        ({}, False),
        pytest.param({"ddp": True, **sdp(2)}, True, marks=pytest.mark.exhaustive),
        ({"ddp": True, **sdp(2), **OFFLOAD}, True),
    ],
    ids=["plain", "sharded", "offloaded"],
)
@pytest.mark.costly
def test_the_memory_of_the_process_is_near_the_prediction(
    config: dict[str, Any], checkpoints: bool
) -> None:
    config = {"microbatches": 2, "sdp_reduce_bucket_size": 2**20, **config}
    layout = "2" if checkpoints else "1"
    for found in check_ranks(process_memory, layout, config, checkpoints, timeout=100):
        for process, predicted in found:
            assert 0.9 * predicted <= process <= 1.1 * predicted, found


# --- what can go wrong ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (1000, 1000),
        (1.5e9, 1_500_000_000),
        ("16 GB", 16 * 10**9),
        ("15.5GiB", int(15.5 * 2**30)),
        (" 12 mb ", 12 * 10**6),
        ("512", 512),
        ("1 TiB", 2**40),
    ],
)
def test_limits(limit: Any, expected: int) -> None:
    assert bytes_of(limit) == expected


@pytest.mark.parametrize(
    "limit",
    ["16 gigs", "16 G B", "GB", "", "1.2.3 GB", "nan", float("nan"), float("inf"), True, []],
)
def test_a_limit_that_is_none(limit: Any) -> None:
    with pytest.raises(SMPUsageError, match="memory must be a number of bytes, or a text with"):
        bytes_of(limit)


@pytest.mark.parametrize("limit", [0, -1, "-16 GB", "0 MiB", 0.5])
def test_a_limit_that_is_not_positive(limit: Any) -> None:
    with pytest.raises(SMPUsageError, match="memory must be positive"):
        bytes_of(limit)


def misused() -> str:
    with pytest.raises(SMPInitializationError, match=r"call smp\.init"):
        smp.memory()
    smp.init({"partitions": 2, "microbatches": 2, "ddp": True})
    with pytest.raises(SMPUsageError, match=r"create smp.DistributedModel before smp\.memory"):
        smp.memory()
    with pytest.raises(SMPUsageError, match=r"explain: there is no smp\.DistributedModel yet"):
        smp.explain(memory="1 GB")
    model = smp.DistributedModel(GPT(16, 2))
    with pytest.raises(SMPUsageError, match="divided only when"):
        smp.explain(memory="1 GB")
    report = smp.memory()
    assert all(not row.predicted and row.now.parameters for row in report.ranks)
    assert "before the first step" in str(report)

    @smp.step
    def asks(model: Any, ids: Tensor) -> None:
        with pytest.raises(SMPUsageError, match=r"smp\.memory cannot be called inside a step"):
            smp.memory()
        model.backward(model(ids).sum())

    ids = torch.zeros(4, LENGTH, dtype=torch.int64)
    with smp.memory() as report:
        asks(model, ids)
        with pytest.raises(SMPUsageError, match="cannot be inside another"), smp.memory():
            pass
    (note,) = report.notes
    assert "no smp.DistributedOptimizer yet" in note
    baton = model.runtime.executor.baton
    with contextlib.suppress(KeyError), smp.memory():
        raise KeyError  # on all ranks
    assert baton.watch is None
    with pytest.raises(SMPUsageError, match="memory must be positive"):
        smp.explain(memory=-1)
    if smp.pp_rank() == 1:
        with pytest.raises(SMPUsageError, match="call it on rank 0 of the pipeline"):
            smp.explain(memory="1 GB")
    return str(report)


def test_calls_that_are_too_early_or_wrong() -> None:
    first, second = check_ranks(misused, "2")
    assert first == second


class Odd(torch.optim.SGD):
    """An optimizer whose state is not known before it steps."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter]["own"] = torch.zeros(parameter.numel() * 3)
        return super().step(closure)


class Unknown(nn.Module):
    """Its control flow depends on data."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x) if x.sum().item() > 0 else -self.linear(x)
        return result


def unknown() -> tuple[str, str]:
    smp.init({"microbatches": 1})
    model = smp.DistributedModel(Unknown())
    optimizer = smp.DistributedOptimizer(Odd(model.parameters(), lr=0.1))

    before = str(smp.memory())
    sums(model, torch.ones(2, 8))
    optimizer.step()
    report = smp.memory()
    (row,) = report.ranks
    assert row.predicted[UPDATE].optimizer == row.now.optimizer == 3 * 4 * (64 + 8)
    assert row.predicted[LATER].activations is None
    return before, str(report)


def test_what_is_not_known_is_said() -> None:
    ((before, after),) = check_ranks(unknown, "1")
    assert "the shapes of the model's arguments are not known before the first step" in before
    assert "what Odd keeps is not known before its first step" in before
    assert "fails on tensors without values" in after
    assert " ? " in after
    assert "Odd" not in after


def asked_by_one_rank() -> tuple[str, list[str]]:
    said = listen()
    smp.init({"partitions": 1, "microbatches": 1, "ddp": True})
    model = smp.DistributedModel(nn.Linear(2, 2))
    assert model is not None
    meeting._LOG_AFTER = timedelta(seconds=0.5)
    smp.state.groups._by_kind["world"] = dist.new_group(timeout=timedelta(seconds=3))
    if smp.rank() == 1:
        threading.Event().wait(5)
        return "", said
    logging.getLogger("smddp.modelparallel").setLevel(logging.WARNING)
    with pytest.raises(SMPPeerError) as caught:
        smp.memory()
    return str(caught.value), said


def test_a_call_on_one_rank_alone_ends_and_names_the_missing_one() -> None:
    (text, said), _ = check_ranks(asked_by_one_rank, "2")
    assert text.startswith("smp.memory: rank 1 of the job did not answer; ranks 0-1 have")
    assert any("smp.memory on rank 0 waits for rank 1 of the job" in line for line in said)


# --- smp.explain ----------------------------------------------------------------------------------


def explained(config: dict[str, Any], checkpoints: bool) -> str:
    model, optimizer, ids = made(config, checkpoints)
    cycle(model, optimizer, ids)
    return smp.explain()


def test_explain_names_what_reduces_memory() -> None:
    config = {**SIMPLE, "partitions": 1, **sdp(2), **OFFLOAD}
    text = check_ranks(explained, "2", config, True)[0]
    assert "sharded data parallelism: 2 ranks share 18 parameters of this partition" in text
    assert "activation checkpointing: 4 regions, which begin with blocks.0, blocks.1" in text
    assert "offload: arguments of checkpointed modules leave memory" in text
    text = check_ranks(explained, "2", {**SIMPLE, **STATE}, False)[0]
    assert "optimizer state: divided over 2 replicas" in text
    assert "offload" not in text
    assert "sharded" not in text


def delayed() -> str:
    smp.init({"microbatches": 1})
    with smp.delay_param_initialization():
        net = nn.Linear(4, 4)
    model = smp.DistributedModel(net)
    assert model is not None
    return smp.explain()


def test_explain_names_delayed_creation() -> None:
    (text,) = check_ranks(delayed, "1")
    assert "delayed creation: each rank has made only the parameters that live on it" in text


def advised(config: dict[str, Any], shares: list[float]) -> tuple[int, list[str]]:
    """Returns what is needed most, and the advice for limits that are shares of it."""
    model, optimizer, ids = made(config, False)
    cycle(model, optimizer, ids)
    need = max(row.needed for row in smp.memory().ranks)
    return need, [smp.explain(memory=int(need * share)) for share in shares]


def needed(config: dict[str, Any], checkpoints: bool) -> int:
    """Returns what was counted in a step."""
    model, optimizer, ids = made(config, checkpoints)
    for _ in range(2):
        cycle(model, optimizer, ids)
    with smp.memory() as report:
        cycle(model, optimizer, ids)
    return max(one.total for row in report.ranks for one in row.measured.values())


def keys_in(text: str) -> dict[str, Any]:
    """Returns the configuration keys that an advice names."""
    lines = [line.strip() for line in text.splitlines() if line.startswith("  '")]
    found = {}
    for line in lines:
        name, _, value = line.partition(": ")
        found[name.strip("'")] = {"True": True, "False": False}.get(value, value)
        if value.isdecimal():
            found[name.strip("'")] = int(value)
    return found


@pytest.mark.costly
def test_what_is_proposed_fits() -> None:
    config = {**SIMPLE, "sdp_param_persistence_threshold": 1000}
    shares = [1.01, 0.95, 0.6, 0.02]
    need, texts = check_ranks(advised, "2", config, shares)[0]
    assert "it fits" in texts[0]
    assert keys_in(texts[1]) == {"shard_optimizer_state": True}
    assert "no change that smp knows makes it fit" in texts[-1]
    assert "The least is" in texts[-1]
    seen = set()
    for share, text in zip(shares[1:-1], texts[1:-1], strict=True):
        assert "With this it needs" in text
        keys, checkpoints = keys_in(text), "set_activation_checkpointing(block)" in text
        seen.add((*keys, checkpoints))
        assert check_ranks(needed, "2", {**config, **keys}, checkpoints)[0] <= 1.02 * share * need
    assert len(seen) == len(shares) - 2  # each limit has an answer of its own
