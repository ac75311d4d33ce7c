"""Checkpointing keeps the arguments of modules only, and offloading moves them out of memory."""

from __future__ import annotations

import functools
import gc
import os
import tempfile
import threading
from pathlib import Path
from typing import Any

import device_cases
import pytest
import torch
from ranks import check_ranks, listen
from smp.common import BY_HAND, squares
from smp.zoo import Fault
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

import smdistributed.modelparallel.torch as smp
from smddp.modelparallel.core.errors import SMPMicrobatchError, SMPPeerError, SMPUsageError
from smddp.modelparallel.torch.activations.offload import Offloader
from smddp.modelparallel.torch.pipeline.frame import Frame
from smddp.modelparallel.torch.pipeline.outlook import Outlook, key_of
from smddp.modelparallel.torch.pipeline.step import Schedule

pytestmark = pytest.mark.multiprocess

LAYERS, WIDTH, MICROBATCHES = 3, 64, 6


def items_of(offloader: Offloader) -> list[Any]:
    """Returns the saved tensors, once nothing moves."""
    offloader._file.await_moves()
    batches = offloader._batches.values()
    items = [item for batch in batches for one in batch if (item := one()) is not None]
    return list({id(item): item for item in items}.values())


class Live:
    """Counts the tensors of a kind whose memory is not free."""

    def __init__(self) -> None:
        self.storages: list[tuple[str, StorageWeakRef]] = []

    def note(self, kind: str, tensor: Tensor) -> None:
        known = {weak.cdata for _, weak in self.storages if not weak.expired()}
        weak = StorageWeakRef(tensor.untyped_storage())
        if weak.cdata not in known:
            self.storages.append((kind, weak))

    def count(self, kind: str) -> int:
        self.storages = [(k, weak) for k, weak in self.storages if not weak.expired()]
        return sum(k == kind for k, _ in self.storages)


class Counts:
    """What a probe has counted."""

    def __init__(self, _: int) -> None:
        self.backward: list[tuple[int, int]] = []
        self.forward: list[int] = []


# Behind caches, where smp does not look: microbatches do not overlap if objects change that the
# code of modules can get to.
live = functools.cache(Live)
counts_of = functools.cache(Counts)


class Layer(nn.Module):
    """Has one activation inside."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        live().note("argument", x)
        h = torch.tanh(self.wide(x))
        live().note("inner", h)
        return self.narrow(h)


class Probe(nn.Module):
    """Counts what lives at the beginning of each backward pass of its rank."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.offloader: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.weight
        if y.requires_grad:
            y.register_hook(self._count)
            counts_of(id(self)).forward.append(live().count("argument"))
        return y

    def _count(self, _: Tensor) -> None:
        if self.offloader is not None:
            for item in items_of(self.offloader):
                if item._away is not None and item._away._back is not None:
                    live().note("argument", item._away._back)
        gc.collect()
        counts_of(id(self)).backward.append((live().count("argument"), live().count("inner")))


def measured(pp: int, strategy: str, config: dict[str, Any]) -> Any:
    """Trains; returns losses and gradients, the largest counts of a step, and what is left."""
    common = {"microbatches": MICROBATCHES, "pipeline": "simple", "ddp": True}
    smp.init({**BY_HAND, "partitions": pp, **common, **config})
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for index in range(pp):
        with smp.partition(index):
            parts.append(nn.Sequential(*[Layer() for _ in range(LAYERS)]))
            parts.append(Probe())
    # The first layer's arguments are not parts of the batch.
    model = smp.DistributedModel(nn.Sequential(nn.Linear(WIDTH, WIDTH), *parts))
    offloader = model.runtime.model.local.offloader
    for part in parts:
        if isinstance(part, Probe):
            part.offloader = offloader
        elif strategy:
            smp.set_activation_checkpointing(part, strategy=strategy)
    probe = parts[2 * smp.pp_rank() + 1]
    assert isinstance(probe, Probe)
    counts = counts_of(id(probe))
    folder = os.environ.get("TMPDIR", "")
    results = []
    for step in range(3):
        x = torch.randn(MICROBATCHES * 32, WIDTH, generator=torch.Generator().manual_seed(step))
        counts.backward.clear()
        counts.forward.clear()
        results.append(squares(model, x).stack())
    results += [parameter.grad for parameter in model.local_parameters()]
    if offloader is not None:
        offloader._file.await_moves()
        assert Path(folder).is_dir()
        assert list(Path(folder).iterdir()) == []  # the file has no name
    most = [max(several) for several in zip(*counts.backward, strict=True)]
    gc.collect()
    moved = 0 if offloader is None else offloader._file._end
    left = live().count("argument") + live().count("inner")
    return results, most, max(counts.forward), left, moved


@pytest.mark.parametrize(("pp", "horizon"), [(2, 2), (2, 1), (1, 1)])
@pytest.mark.costly
def test_what_is_in_memory_at_the_beginning_of_a_backward_pass(
    pp: int, horizon: int, tmp_path: Path
) -> None:
    microbatches = MICROBATCHES if pp > 1 else 1  # with one partition, one after the other
    runs: dict[str, Any] = {}
    for name, strategy, config in (
        ("plain", "", {}),
        ("each", "each", {}),
        ("contiguous", "contiguous", {}),
        ("offload", "each", {"offload_activations": True, "activation_loading_horizon": horizon}),
    ):
        if horizon == 1 and pp > 1 and name == "contiguous":
            continue
        env = {"TMPDIR": str(tmp_path)}
        runs[name] = check_ranks(measured, str(pp), pp, strategy, config, env=env)
    for name, ranks in runs.items():
        for rank, (results, (arguments, inner), forward, left, moved) in enumerate(ranks):
            where = f"{name} on rank {rank}"
            torch.testing.assert_close(results, runs["plain"][rank][0], rtol=0, atol=0, msg=where)
            assert inner == (LAYERS * microbatches if name == "plain" else 0), where
            layers = 1 if name == "contiguous" else LAYERS
            if name != "offload":
                assert arguments == layers * microbatches, where
                assert forward == arguments, where
                assert moved == 0, where
            elif pp > 1:
                # Those of the task that begins, and of the next ones.
                assert LAYERS <= arguments <= LAYERS * (horizon + 1), where
                assert forward <= LAYERS * (horizon + 1), where
                assert moved > 0, where
            else:
                assert arguments <= horizon + 1, where
                assert forward <= horizon + 1, where
                assert moved > 0, where
            assert left == 0, where


def failing() -> list[str]:
    """The scratch file cannot be written; the next step works."""
    said = listen()
    config = {"microbatches": 4, "ddp": True, "pipeline": "simple"}
    offload = {"offload_activations": True, "activation_loading_horizon": 1}
    smp.init({**BY_HAND, "partitions": 2, **config, **offload})
    parts = []
    for index in range(2):
        with smp.partition(index):
            parts.append(nn.Sequential(*[Layer() for _ in range(LAYERS)]))
    model = smp.DistributedModel(nn.Sequential(*parts))
    x = torch.ones(4 * 32, WIDTH)
    squares(model, x)
    assert smp.rank() != 0 or "there is none" in said[-1]
    squares(model, x)
    assert sum("there is none" in text for text in said) == (smp.rank() == 0)
    for part in parts:
        smp.set_activation_checkpointing(part)
    texts = []
    folder = tempfile.gettempdir()
    if smp.rank() == 1:
        os.environ["TMPDIR"] = folder + "/nothing"
    with pytest.raises(SMPMicrobatchError) as caught:
        squares(model, x)
    texts.append(str(caught.value).splitlines()[0])
    os.environ["TMPDIR"] = folder
    losses = squares(model, x).stack()
    write = os.pwrite

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    if smp.rank() == 0:
        os.pwrite = full
    with pytest.raises(SMPMicrobatchError) as caught:
        squares(model, x)
    texts.append(str(caught.value).splitlines()[0])
    os.pwrite = write
    assert torch.equal(squares(model, x).stack(), losses)
    return texts


def test_a_scratch_file_that_cannot_be_written_fails_the_step_on_all_ranks() -> None:
    first, second = check_ranks(failing, "2")
    assert first == second
    assert "rank 1 of the pipeline, microbatch" in first[0]
    assert "SMPUsageError: offload_activations: the scratch file in" in first[0]
    assert "nothing cannot be used" in first[0]
    assert "rank 0 of the pipeline, microbatch" in first[1]
    assert "No space left on device. Set TMPDIR to a folder with more room" in first[1]


def failing_in(when: str, pp: int, config: dict[str, Any]) -> list[int]:
    """Fails on the last partition of the first replica; returns what is left without `gc`."""
    smp.init({**BY_HAND, "partitions": pp, "microbatches": MICROBATCHES, "ddp": True, **config})
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    faults = [Fault() for _ in range(pp)]
    for index in range(pp):
        with smp.partition(index):
            parts.append(nn.Sequential(*[Layer() for _ in range(LAYERS)]))
            parts.append(faults[index])
    model = smp.DistributedModel(nn.Sequential(nn.Linear(WIDTH, WIDTH), *parts))
    if config.get("offload_activations"):
        for part in parts[::2]:
            smp.set_activation_checkpointing(part)
    x = torch.randn(MICROBATCHES * 32, WIDTH)
    squares(model, x)
    gc.collect()
    gc.disable()
    if smp.dp_rank() == 0 and smp.pp_rank() == pp - 1:
        faults[-1].when = when
    with pytest.raises((SMPMicrobatchError, SMPPeerError)):
        squares(model, x)
    smp.barrier()
    left = [live().count("argument") + live().count("inner")]
    if pp == 1:
        # Neither does a forward pass keep values if no backward pass follows it.
        faults[-1].when = ""
        model(x)
        left.append(live().count("argument") + live().count("inner"))
    return left


@pytest.mark.parametrize(
    ("when", "ranks", "pp", "config"),
    [
        ("forward", 4, 2, {"offload_activations": True}),
        ("backward", 2, 2, {"pipeline": "interleaved"}),
        ("backward", 2, 1, {"sharded_data_parallel_degree": 2}),
        ("backward", 4, 2, {"sharded_data_parallel_degree": 2, "pipeline": "simple"}),
    ],
)
def test_a_step_that_fails_keeps_no_values(
    when: str, ranks: int, pp: int, config: dict[str, Any]
) -> None:
    for left in check_ranks(failing_in, str(ranks), when, pp, config):
        assert not any(left)


def latest(count: int) -> Any:
    return lambda keys: keys[: -count - 1 : -1]


def near(offloader: Offloader) -> int:
    """Returns how many saved tensors are in memory, once nothing moves."""
    offloader.balance()
    offloader._file.await_moves()
    return sum(
        item._away is None or item._away._original is not None or item._away._back is not None
        for item in items_of(offloader)
    )


def test_values_come_back_with_their_form() -> None:
    offloader = Offloader(latest(1), list)
    image = torch.randn(4, 8, 16, 16)
    tensors = [
        image,
        image.to(memory_format=torch.channels_last),
        torch.randn(64, 64)[:, 8:40],
        torch.randn(64, 64).t(),
        torch.randn(64, 64, dtype=torch.bfloat16),
        torch.randint(0, 2, (80, 80)).bool(),
        torch.randn(64, 64, dtype=torch.complex64),
        torch.randn(64, 64, requires_grad=True),
        torch.randn(1, 64).expand(64, 64),
        torch.tensor(1.5),
    ]
    copies = [tensor.detach().clone() for tensor in tensors]
    forms = [(tensor.stride(), tensor.requires_grad) for tensor in tensors]
    fetch = offloader.keep(None, tensors)
    more = offloader.keep(None, [torch.randn(64, 64)])
    del tensors, image
    assert near(offloader) == 1
    for _ in range(2):  # as with retain_graph
        for value, copy, (stride, flag) in zip(fetch(), copies, forms, strict=True):
            assert torch.equal(value, copy)
            assert value.dtype == copy.dtype
            assert value.stride() == stride
            assert value.requires_grad == flag
            assert value.is_leaf
    del more, fetch, value
    assert near(offloader) == 0


def test_a_tensor_is_written_once_and_those_of_the_model_never() -> None:
    weight = nn.Parameter(torch.randn(64, 64))
    offloader = Offloader(latest(0), lambda: [weight])
    mask = torch.randn(64, 64)
    fetches = [offloader.keep(None, [mask, weight.detach().t()]) for _ in range(3)]
    offloader.keep(None, [mask + 1])
    assert near(offloader) == 0
    assert offloader._file._end == 2 * mask.nbytes
    before = mask.clone()
    mask += 1
    fetches.append(offloader.keep(None, [mask]))
    assert near(offloader) == 0
    assert offloader._file._end == 2 * mask.nbytes  # in the place that is free again
    for fetch in fetches[:3]:
        value, shared = fetch()
        assert torch.equal(value, before)
        assert shared.data_ptr() == weight.data_ptr()
    assert torch.equal(fetches[3]()[0], mask)


def test_a_change_in_place_is_an_error() -> None:
    offloader = Offloader(latest(1), list)
    x = torch.randn(64, 64)
    fetch = offloader.keep(None, [x])
    x += 1
    with pytest.raises(SMPUsageError, match="was changed in place after the call"):
        fetch()


def test_batches_come_back_before_they_are_needed() -> None:
    offloader = Offloader(latest(2), list)
    values = [torch.full((64, 64), float(number)) for number in range(6)]
    fetches = [offloader.keep(None, [value]) for value in values]
    del values
    for number in range(5, -1, -1):
        assert near(offloader) == min(2, number + 1)
        (value,) = fetches.pop()()
        assert value[0, 0] == number
    del value
    assert near(offloader) == 0
    assert not any(thread.name == "smp-offload" for thread in threading.enumerate())


def test_a_step_gives_the_room_of_the_last_one_back() -> None:
    offloader = Offloader(latest(0), list)
    kept = offloader.keep(None, [torch.ones(32, 64)])
    for rows in (64, 128):
        offloader.begin_step()
        offloader.keep(None, [torch.ones(rows, 64)])
        assert near(offloader) == 0
    assert offloader._file._end == (32 + 64 + 128) * 256  # the first value is still in use
    assert kept()[0].sum() == 32 * 64
    del kept
    offloader.begin_step()
    assert os.fstat(offloader._file._file.fileno()).st_size == offloader._file._end == 0


class Copies(TorchFunctionMode):
    """Notes each copy between the host and a device: its two sides, its stream, and if it waits."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seen: list[tuple[Tensor, Tensor, int, bool]] = []

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is Tensor.copy_ and args[0].device != args[1].device:
            stream = torch.accelerator.current_stream(self.device).stream_id
            self.seen.append((*args, stream, not kwargs.get("non_blocking")))
        return function(*args, **kwargs)


def on_a_device(name: str) -> None:
    there = device_cases.Fake() if name == "fake" else device_cases.Cuda()
    offloader = Offloader(latest(2), list)
    there.slow_down()
    values = [torch.randn(64, 64) for _ in range(6)]
    copies = Copies(there.device)
    with copies:
        fetches = [offloader.keep(None, [value.to(there.device)]) for value in values]
        for fetch, value in reversed(list(zip(fetches, values, strict=True))):
            (found,) = fetch()
            assert found.device == there.device
            assert torch.equal(found.cpu(), value)
    # The last two are always near. The others leave once, and come back once; but the memory of the
    # one that has left last is not freed before another one leaves.
    outward = [target.device.type == "cpu" for target, *_ in copies.seen]
    assert outward == [True] * 4 + [False] * 3
    own = offloader._hosts[there.device].stream.stream_id
    assert own != torch.accelerator.current_stream(there.device).stream_id
    for target, source, stream, waits in copies.seen:
        host = target if target.device.type == "cpu" else source
        assert host.is_pinned()
        assert stream == own
        assert not waits
    copies.seen.clear()
    del fetches, fetch, found, target, source, host
    gc.collect()
    there.finish()


@pytest.mark.skipif(device_cases.find_fake() is None, reason="the C++ tests were not built")
def test_values_of_a_device_go_to_pinned_memory() -> None:
    check_ranks(on_a_device, "1", "fake")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_values_of_a_gpu_go_to_pinned_memory() -> None:
    check_ranks(on_a_device, "1", "cuda")


def frame(microbatch: int, *path: int) -> Frame:
    return Frame(microbatch=microbatch, forward=True, path=path, name="", depth=1, grad=True)


def test_the_outlook_counts_forward_tasks() -> None:
    outlook = Outlook(4)
    outlook.begin_step(Schedule(8, False, 4, 4))
    keys = []
    for microbatch in range(4):
        for path in ((0, 0), (1, 0)):
            outlook.enter(frame(microbatch, *path), True)
            keys.append(key_of(frame(microbatch, *path)))
    # Backward, forward, backward, forward: so the third one is five tasks ahead.
    assert outlook.soonest(keys) == [(0, (1, 0)), (0, (0, 0))]
    outlook.enter(frame(0, 1, 0), False)
    assert outlook.soonest(keys) == [(0, (1, 0)), (0, (0, 0)), (1, (1, 0))]
    for microbatch in range(4, 8):
        outlook.enter(frame(microbatch, 0, 0), True)
    assert len(outlook.soonest(keys)) == 4
    outlook.begin_step(Schedule(8, True, 8, 8))
    for microbatch in range(6):
        outlook.enter(frame(microbatch), True)
    # Two forward tasks come first.
    assert outlook.soonest([(number, ()) for number in range(6)]) == [(0, ()), (1, ())]
