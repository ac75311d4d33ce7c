"""Messages between ranks: every kind of tensor, every length, order, interrupts, ends."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from ranks import arrive, await_ranks, check_ranks, rotating

import smdistributed.modelparallel.torch as smp
from smddp.modelparallel.torch.job.groups import timeout_of
from smddp.modelparallel.torch.job.state import state
from smddp.modelparallel.torch.pipeline.channel import Channel, Ended, _ThreadStreams
from smddp.modelparallel.torch.pipeline.protocol import Kind, Message
from smddp.torch import _C

pytestmark = pytest.mark.multiprocess


def sparse() -> list[torch.Tensor]:
    """Returns random sparse tensors of each layout: small, large, hybrid, empty."""
    large = torch.randn(60, 80) * (torch.rand(60, 80) < 0.5)
    twice = torch.tensor([[0, 2, 0], [1, 1, 1]])
    return [
        torch.sparse_coo_tensor(twice, torch.randn(3), (3, 4)).requires_grad_(),
        torch.sparse_coo_tensor(twice[:1], torch.randn(3, 5), (4, 5)).coalesce(),
        torch.sparse_coo_tensor(size=(3, 0)),
        large.to_sparse(),
        large.to_sparse_csr().requires_grad_(),
        large[:7, :9].double().to_sparse_csc(),
        large.to_sparse_bsr((4, 5)),
        large.to_sparse_bsc((4, 5)),
        torch.stack([large[0:4] != 0, large[0:4] != 0]).to_sparse_csr(),
    ]


def messages(rank: int) -> list[tuple[bytes, list[torch.Tensor | None]]]:
    """Returns what a rank sends."""
    torch.manual_seed(rank)
    tensors: list[torch.Tensor | None] = [
        None,
        torch.empty(0, 3),
        torch.tensor(2.5 + rank, requires_grad=True),
        torch.randn(4, 6).t(),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(40, 50, 60).permute(1, 2, 0),
        torch.randn(8, 6).t()[:, ::2],
        torch.randn(3, 1).expand(3, 4),
        torch.randn(1, 0, 5).permute(2, 0, 1),
        torch.tensor([True, False]),
        torch.randn(3, dtype=torch.bfloat16),
        torch.randn(2, dtype=torch.complex64).conj(),
        torch.arange(1024, dtype=torch.int64) * rank,
        torch.randn(100_000, requires_grad=True),
        *sparse(),
    ]
    short: list[tuple[bytes, list[torch.Tensor | None]]] = [
        (b"%d" % length, [torch.full((length,), rank, dtype=torch.uint8)])
        for length in (0, 1, 900, 1000, 4096, 4097, 9000)
    ]
    many: list[torch.Tensor | None] = [torch.tensor(number) for number in range(2000)]
    return [(b"all", tensors), *short, (b"x" * 20_000, []), (b"many", many), (b"", [])]


def same(found: torch.Tensor | None, value: torch.Tensor | None) -> bool:
    """Says whether a tensor has come as it was sent."""
    if found is None or value is None:
        return found is value
    if value.layout is not torch.strided:
        return (
            (found.layout, found.shape, found.requires_grad)
            == (value.layout, value.shape, value.requires_grad)
            and (
                found.layout is not torch.sparse_coo or found.is_coalesced() == value.is_coalesced()
            )
            and all(map(torch.equal, parts(found), parts(value)))
        )
    return (
        found.requires_grad == value.requires_grad
        and found.dtype == value.dtype
        # Those of the copy are the same, unless the tensor has gaps.
        and found.stride() == value.clone().stride()
        and torch.equal(found, value)
    )


def parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Returns the dense parts of a sparse tensor."""
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]


@pytest.mark.parametrize("least", [0, 960, 8192])
def test_what_is_encoded_is_decoded(least: int) -> None:
    for header, tensors in messages(0):
        front, large = _C.encode_message(header, tensors, False, least)
        length = _C.front_length(front[:16])
        assert front.numel() == max(length, least)
        found_header, found, places = _C.decode_front(front)
        for place, part in zip(places, large, strict=True):
            place.copy_(part)
        assert found_header == header
        assert len(found) == len(tensors)
        assert all(map(same, found, tensors))
        with pytest.raises(RuntimeError, match="damaged"):
            _C.decode_front(front[: length - 1])


# After the 16 bytes that every front begins with: kind, dtype, ... of a tensor, its size, and its
# dimension.
@pytest.mark.parametrize(
    ("place", "value"), [(0, 3), (0, 4), (1, 127), (1, 200), (11, 128), (12, 1)]
)
def test_a_wrong_description_of_a_tensor_is_refused(place: int, value: int) -> None:
    front, _ = _C.encode_message(b"", [torch.zeros(2)], False, 0)
    front[16 + place] = value
    with pytest.raises(RuntimeError, match="damaged"):
        _C.decode_front(front)


@pytest.mark.parametrize("seed", rotating(list(range(40)), 4))
def test_what_is_damaged_at_random_is_refused_or_decoded(seed: int) -> None:
    """Also makes the tensors, which the fuzzer of the front (message_fuzz.cc) does not."""
    random = Random(seed)
    for header, tensors in messages(0):
        right = bytes(_C.encode_message(header[:100], tensors[:50], False, 0)[0].numpy())
        for _ in range(200):
            front = bytearray(right)
            for _ in range(random.randint(1, 4)):
                # Most of what is checked stands at the beginning.
                place = random.randrange(min(len(front), random.choice([64, len(front)])))
                front[place] = random.choice([0, 1, 127, 128, 255, random.randrange(256)])
            cut = torch.frombuffer(front, dtype=torch.uint8)[: random.randint(1, 2 * len(front))]
            try:
                found, places = _C.decode_front(cut)[1:]
            except RuntimeError:
                continue
            assert len(found) >= len(places)


def new_mailbox() -> _C.Mailbox:
    """Returns a mailbox for the group of all ranks."""
    dist.init_process_group("smddp")
    group = dist.group.WORLD
    assert group is not None
    backend: Any = group._get_backend(torch.device("cpu"))
    return _C.Mailbox(backend)


def exchange() -> int:
    """Sends everything to everybody, twice; returns how many messages came."""
    mailbox = new_mailbox()
    me, size = dist.get_rank(), dist.get_world_size()
    count = 0
    for _ in range(2):
        mailbox.open()
        for peer in range(size):
            mine = messages(me)
            for number, (header, tensors) in enumerate(mine if peer != me else []):
                mailbox.send(peer, header, tensors, number == len(mine) - 1)
        expected = {peer: messages(peer) for peer in range(size) if peer != me}
        while any(expected.values()):
            for peer, header, tensors, _, error in mailbox.take(True):
                assert error is None
                wanted, values = expected[peer].pop(0)
                assert header == wanted
                assert len(tensors) == len(values)
                assert all(map(same, tensors, values))
                count += 1
        assert mailbox.take(False) == []
        mailbox.flush()
        dist.barrier()
    return count


@pytest.mark.parametrize("layout", ["2", "3", "2x1"])
def test_all_that_is_sent_arrives_in_order(layout: str) -> None:
    counts = check_ranks(exchange, layout)
    assert counts == [2 * len(messages(0)) * (len(counts) - 1)] * len(counts)


def exchange_over_channel(backend: str) -> int:
    """Does the same with a channel, which takes its own way over each backend."""
    dist.init_process_group(backend)
    group = dist.group.WORLD
    assert group is not None
    me = dist.get_rank()
    channel = Channel(group, me, dist.get_world_size())
    count = 0
    for _ in range(2):
        channel.open()
        for peer in channel.peers:
            for header, tensors in messages(me):
                channel.send(peer, Kind.FORWARD, (header, me), tensors)
            channel.send(peer, Kind.END, None, [])
        expected = {peer: messages(peer) for peer in channel.peers}
        while channel.expects:
            for peer, item in channel.take(True):
                if isinstance(item, Ended):
                    assert item.error is None
                    assert not expected[peer]
                    channel.end(peer, item)
                elif item.kind != Kind.END:
                    header, values = expected[peer].pop(0)
                    assert isinstance(item, Message)
                    assert item.header == (header, peer)
                    assert len(item.tensors) == len(values)
                    assert all(map(same, item.tensors, values))
                    count += 1
        assert channel.drain(10) == []
        dist.barrier()
    return count


@pytest.mark.parametrize("backend", ["smddp", "gloo"])
def test_a_channel_brings_the_same_over_any_backend(backend: str) -> None:
    counts = check_ranks(exchange_over_channel, "2", backend)
    assert counts == [2 * len(messages(0))] * 2


def aborted() -> tuple[float, str, bool]:
    """Rank 0 ends the groups; returns what rank 1 sees of that, and how it waits for messages."""
    dist.init_process_group("smddp", timeout=timedelta(seconds=20))
    smp.init({"partitions": 2, "microbatches": 2})
    groups = state.groups
    why = ""
    channel = Channel(groups.pipeline, dist.get_rank(), 2)
    channel.open()
    if dist.get_rank() == 0:
        await_ranks("in", 1)
        groups.abort("the reason", lost=True)
        await_ranks("out", 1)
    else:
        arrive("in")
        begin = time.monotonic()
        ((_, item),) = channel.take(True)
        assert isinstance(item, Ended)
        why = f"{item.error}" if time.monotonic() - begin < 15 else "timed out"
        arrive("out")
    threads = any(thread.name.startswith("smp-from-") for thread in threading.enumerate())
    return timeout_of(groups.pipeline).total_seconds(), why, threads


@pytest.mark.parametrize("detail", ["OFF", "DETAIL"])
def test_torchs_wrapper_does_not_hide_smddp(detail: str) -> None:
    both = check_ranks(aborted, "2", env={"TORCH_DISTRIBUTED_DEBUG": detail})
    assert [seconds for seconds, _, _ in both] == [20, 20]
    assert "the reason" in both[1][1]
    assert [threads for _, _, threads in both] == [False, False]


class Unread:
    """A group whose sends end only when somebody waits for them."""

    pending = most = 0

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Unread:
        self.pending += 1
        self.most = max(self.most, self.pending)
        return self

    def wait(self) -> None:
        self.pending -= 1


def test_over_other_backends_few_sends_are_pending() -> None:
    group = Unread()
    streams = _ThreadStreams(group, [])  # type: ignore[arg-type]
    for number in range(3 * _ThreadStreams._PENDING):
        streams.send(1, str(number).encode(), [], False)
    assert group.most == _ThreadStreams._PENDING
    streams.flush()
    assert group.pending == 0


@on_ranks("2")
def test_a_wait_can_be_interrupted() -> None:
    mailbox = new_mailbox()
    mailbox.open()
    # An interrupt before a wait ends the next wait; one during a wait ends that.
    mailbox.interrupt()
    assert mailbox.take(True) == []
    threading.Timer(0.1, mailbox.interrupt).start()
    assert mailbox.take(True) == []
    # Only after both ranks have waited in vain.
    dist.barrier()
    mailbox.send(1 - dist.get_rank(), b"end", [], True)
    with torch.inference_mode():
        ((_, header, _, last, _),) = mailbox.take(True)
    assert header == b"end"
    assert last
    with pytest.raises(RuntimeError, match="lives on another rank"):
        mailbox.send(1 - dist.get_rank(), b"", [torch.empty(1, device="meta")], False)
