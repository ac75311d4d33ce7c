"""smddp.numpy: collectives on numpy arrays, without torch, against the same arithmetic in numpy."""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ranks
import torch
from on_ranks import on_ranks

import smddp.numpy
from smddp.numpy import Op

pytestmark = pytest.mark.multiprocess

TYPES = [np.float32, np.float64, np.float16, np.complex64, np.complex128, np.bool_]
TYPES += [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64]
COUNTS = [0, 1, 1021, 100_003]


def array_of(rank: int, count: int, kind: Any) -> np.ndarray:
    values = (np.arange(count) + 3 * rank) % 7
    return values.astype(kind)


def same(found: Any, expected: Any, what: str) -> None:
    assert found.dtype == expected.dtype, what
    assert found.shape == expected.shape, what
    assert np.array_equal(found, expected), what


@pytest.mark.parametrize("layout", ["1", "2", "3", "2x2"])
@on_ranks("{layout}")
def test_values(layout: str) -> None:
    world = smddp.numpy.init()
    size, me = world.size, world.rank
    for count in COUNTS:
        for kind in TYPES:
            what = f"{count} x {np.dtype(kind)}"
            own = array_of(me, count, kind)
            every = np.stack([array_of(rank, count, kind) for rank in range(size)])
            total = every.any(0) if kind is np.bool_ else every.sum(0, dtype=kind)
            same(world.allreduce(own), total, what)
            same(own, array_of(me, count, kind), what)
            in_place = own.copy()
            assert world.allreduce(in_place, out=in_place) is in_place
            same(in_place, total, what)
            for root in range(size):
                result = world.reduce(own, root)
                assert (result is None) == (me != root)
                if me == root:
                    same(result, total, what)
                    same(own, array_of(me, count, kind), what)
            block = own.copy()
            world.broadcast(block, size - 1)
            same(block, every[-1], what)
            same(world.allgather(own), every, what)
            gathered = world.gather(own, 0)
            if me == 0:
                same(gathered, every, what)
            same(world.scatter(every if me == 0 else None, 0, out=np.empty_like(own)), own, what)
            tables = np.stack([array_of(rank * size + me, count, kind) for rank in range(size)])
            parts = np.stack([array_of(me * size + rank, count, kind) for rank in range(size)])
            same(world.alltoall(tables), parts, what)
            sums = np.stack([array_of(me + rank, count, kind) for rank in range(size)])
            expected = sums.any(0) if kind is np.bool_ else sums.sum(0, dtype=kind)
            mine = np.stack([array_of(me + rank, count, kind) for rank in range(size)])
            same(world.reduce_scatter(mine), expected, what)
    world.barrier()
    world.leave()


@on_ranks("2")
def test_operations_and_messages() -> None:
    world = smddp.numpy.init()
    own = np.array([1.0, -2.0, 3.0]) * (world.rank + 1)
    every = world.allgather(own)
    expected = {
        Op.SUM: every.sum(0),
        Op.AVERAGE: every.mean(0),
        Op.PRODUCT: every.prod(0),
        Op.MIN: every.min(0),
        Op.MAX: every.max(0),
    }
    for op, value in expected.items():
        np.testing.assert_allclose(world.allreduce(own, op=op), value, rtol=1e-15)
    scaled = world.allreduce(own, op=Op.SCALED_SUM, factor=0.5)
    np.testing.assert_allclose(scaled, every.sum(0) / 2, rtol=1e-15)
    bits = np.array([6, 3], np.uint8) << world.rank
    both = world.allgather(bits)
    assert np.array_equal(world.allreduce(bits, op=Op.BXOR), both[0] ^ both[1])
    # Shapes, views, what is not an array, several operations at once.
    table = np.arange(12.0).reshape(3, 4)
    assert world.allreduce(table.T).shape == (4, 3)
    assert np.array_equal(world.allreduce(table.T), 2 * table.T)
    assert world.allreduce(7.5).shape == ()
    assert world.allreduce([1, 2]).tolist() == [2, 4]
    works = [world.allreduce(np.full(1000, n), wait=False) for n in range(20)]
    world.barrier()
    for number, work in enumerate(works):
        assert (work.wait() == 2 * number).all()
        assert work.is_completed()
    # Memory that ranks share.
    shared = smddp.numpy.empty((1000, 10), np.float32)
    shared[:] = world.rank
    world.allreduce(shared, out=shared)
    assert (shared == 1).all()
    del shared
    # Messages.
    other = 1 - world.rank
    sent = world.send(np.arange(5) + world.rank, other, tag=3, wait=False)
    received = world.receive(np.empty(5, int), other, tag=3)
    assert received.tolist() == [other + n for n in range(5)]
    sent.wait()
    if world.rank == 0:
        work = world.receive(np.empty(2), wait=False)
        work.wait()
        assert work.source() == 1
    else:
        world.send(np.ones(2), 0)
    # Nothing is held any longer.
    world.barrier()
    deadline = time.monotonic() + 10
    while smddp.numpy._held and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not smddp.numpy._held
    world.leave()
    with pytest.raises(ValueError, match="has left the group"):
        world.barrier()


def divided() -> tuple[int, float]:
    world = smddp.numpy.init()
    odd = world.rank % 2
    members = [rank for rank in range(world.size) if rank % 2 == odd]
    group = world.split(members[::-1])
    assert group is not None
    assert group.rank == members[::-1].index(world.rank)
    total = float(group.allreduce(np.array([float(world.rank)]))[0])
    none = world.split([0] if world.rank < 2 else [])
    assert (none is None) == (world.rank != 0)
    group.leave()
    world.leave()
    return odd, total


def test_groups_of_some_ranks() -> None:
    assert ranks.check_ranks(divided, "4") == [(0, 2.0), (1, 4.0), (0, 2.0), (1, 4.0)]


@pytest.mark.parametrize("layout", ["2", "2x1"])
@on_ranks("{layout}")
def test_one_job_after_another(layout: str) -> None:
    """Leaves and joins as fast as possible; no rank may meet at the store of the job before."""
    for number in range(10):
        world = smddp.numpy.init(timeout=30)
        assert world.allreduce(np.array(number + world.rank)) == 2 * number + 1
        world.leave()


# --- errors ---------------------------------------------------------------------------------------


def message_of(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@on_ranks("2")
def test_arrays_of_others() -> None:
    """Tensors of torch come through DLPack, without a copy."""
    world = smddp.numpy.init()
    mine = torch.arange(4, dtype=torch.float64) + world.rank
    np.testing.assert_array_equal(world.allreduce(mine), [1.0, 3.0, 5.0, 7.0])
    result = torch.empty(4, dtype=torch.float64)
    world.allreduce(mine, out=result)
    assert result.tolist() == [1.0, 3.0, 5.0, 7.0]
    world.broadcast(mine, 1)
    assert mine.tolist() == [1.0, 2.0, 3.0, 4.0]
    with pytest.raises(TypeError, match="written to a list"):
        world.broadcast([1, 2], 0)
    # On every rank, although only on rank 0 both begin at one address.
    both = np.ones((2, 3))
    with pytest.raises(ValueError, match="overlap"):
        world.reduce_scatter(both, out=both[world.rank])
    world.leave()


@on_ranks("2")
def test_misuse_is_refused_before_anything_is_started() -> None:
    world = smddp.numpy.init()
    x = np.ones((2, 3))
    frozen = np.ones(3)
    frozen.flags.writeable = False
    for call, text in [
        (lambda: world.allreduce(np.array(["a"])), "TypeError: smddp: arrays of <U1"),
        (lambda: world.allreduce(x, out=np.ones(6)), "ValueError: smddp: the result has shape"),
        (lambda: world.allreduce(x, out=x.astype(np.float32)), "ValueError: smddp: the result has"),
        (lambda: world.broadcast(frozen, 1 - world.rank), "ValueError: smddp: an array that is"),
        (lambda: world.broadcast([1], 1 - world.rank), "TypeError: smddp: the result cannot be"),
        (lambda: world.broadcast(x, 5), "ValueError: smddp: the root, 5, is no rank of a group"),
        (lambda: world.broadcast(x, 2**32), "ValueError: smddp: 4294967296 is too large"),
        (
            lambda: world.reduce_scatter(np.ones((3, 2))),
            "ValueError: smddp: the array needs a part",
        ),
        (lambda: world.scatter(None, 1 - world.rank), "TypeError: smddp: scatter needs `out`"),
        (
            lambda: world.allreduce(x, op=Op.BAND),
            "ValueError: smddp: BAND of float64 is not supported; float64 has SUM, AVERAGE, "
            "PRODUCT, MIN, MAX, SCALED_SUM",
        ),
        (
            lambda: world.allreduce(x * 1j, op=Op.PRODUCT),
            "ValueError: smddp: PRODUCT of complex128 is not supported; complex128 has SUM, "
            "AVERAGE, SCALED_SUM",
        ),
        (
            lambda: world.allreduce(x.astype(int), op=Op.SCALED_SUM),
            "ValueError: smddp: SCALED_SUM of int64 is not supported",
        ),
        (lambda: world.allreduce(x > 0, op=Op.AVERAGE), "ValueError: smddp: AVERAGE of bool"),
        *(
            (
                lambda call=call, op=op: call(x, op=op),
                f"ValueError: smddp: {op!r} is no Op: it is one of SUM, AVERAGE, ",
            )
            for call in (
                world.allreduce,
                world.reduce_scatter,
                lambda x, op: world.reduce(x, 0, op=op),
            )
            for op in ("sum", 9, None)
        ),
        (lambda: world.broadcast(x, 1.0), "TypeError: smddp: 1.0 is no integer: a rank or a tag"),
        (lambda: world.send(x, 1 - world.rank, tag="a"), "TypeError: smddp: 'a' is no integer"),
        (lambda: world.split([0.0]), "TypeError: smddp: 0.0 is no integer"),
        (lambda: world.split([2**32]), "ValueError: smddp: 4294967296 is too large"),
        (lambda: world.send(x, world.rank), "ValueError: smddp: a rank cannot send to itself"),
        (lambda: world.send(x, 7), "ValueError: smddp: the peer is no rank of the group"),
        (lambda: world.send(x, 1 - world.rank, tag=-1), "ValueError: smddp: the tag is negative"),
        (
            lambda: world.send(x, 1 - world.rank, tag=2**32),
            "ValueError: smddp: 4294967296 is too large",
        ),
        (lambda: world.barrier(timeout=0), "ValueError: smddp: a timeout of 0 seconds"),
        (lambda: world.barrier(timeout="5"), "TypeError: smddp: a timeout is a number of seconds"),
        (lambda: world.allreduce(np.ma.masked_array(x, x > 0)), "TypeError: smddp: a mask cannot"),
        (lambda: world.broadcast(np.ma.masked_array(x), 0), "TypeError: smddp: a mask cannot"),
        (lambda: world.abort(None), "TypeError: smddp: a reason is a string, not None"),
        (lambda: world.split([0, 0]), "ValueError: smddp: a rank is named twice"),
        (lambda: world.split([9]), "ValueError: smddp: 9 is no rank of a group of 2"),
    ]:
        assert message_of(call).startswith(text), message_of(call)
    assert not smddp.numpy._held
    # The group is whole.
    assert world.allreduce(np.ones(1))[0] == 2
    world.leave()


def wrong(how: str) -> str:
    world = smddp.numpy.init(timeout=20)
    x = np.ones(10)
    if how == "mismatch":
        return message_of(lambda: world.allreduce(x if world.rank else x[:5]))
    if how == "absent" and world.rank:
        time.sleep(2)
        return message_of(world.leave)
    if how == "absent":
        return message_of(lambda: world.barrier(timeout=0.5))
    if world.rank:
        os.kill(os.getpid(), signal.SIGKILL)
    return message_of(lambda: world.allreduce(x))


def test_errors_name_the_rank() -> None:
    for text in ranks.check_ranks(wrong, "2", "mismatch"):
        assert text.startswith("CollectiveMismatchError: smddp: ")
        assert "rank 0" in text
        assert "rank 1" in text
    assert "rank 1" in ranks.check_ranks(wrong, "2", "absent")[0]
    survivor = ranks.run_ranks(wrong, "2", "killed")[0]
    assert survivor.value.startswith("PeerLostError: smddp: "), str(survivor)
    assert "rank 1" in survivor.value


def interrupted() -> str:
    world = smddp.numpy.init()
    if world.rank == 0:
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            world.receive(np.empty(1), 1)
    else:
        return message_of(world.barrier)
    return ""


def test_ctrl_c_ends_a_wait() -> None:
    began = time.monotonic()
    _, text = ranks.check_ranks(interrupted, "2")
    assert text.startswith("AbortedError: smddp: ")
    assert time.monotonic() - began < 20


@on_ranks("2")
def test_a_question_waits_as_long_as_it_says_and_hears_signals() -> None:
    world = smddp.numpy.init()
    if world.rank:
        world.barrier()
        world.send(np.ones(4), 0)
        return
    work = world.receive(np.zeros(4), 1, wait=False)
    for seconds in (math.inf, math.nan, -1.0):
        with pytest.raises(ValueError, match="it must be 0 or more, and end"):
            work.is_completed(seconds)
    with pytest.raises(TypeError, match="a time to wait is a number of seconds, not 'a'"):
        work.is_completed("a")
    assert not work.is_completed()
    began = time.monotonic()
    assert not work.is_completed(0.3)
    assert 0.3 <= time.monotonic() - began < 10

    def stop(*_: object) -> None:
        raise InterruptedError("the program's own")

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    with pytest.raises(InterruptedError, match="the program's own"):
        work.is_completed(60)
    # The operation goes on, and the group is whole.
    world.barrier()
    while not work.is_completed(1):
        pass
    assert work.wait().tolist() == [1, 1, 1, 1]


@on_ranks("1")
def test_wrong_arguments_of_init() -> None:
    for arguments, text in [
        ({"port": "29600"}, "TypeError: smddp: '29600' is no integer: a port is one"),
        ({"port": 2**32}, "ValueError: smddp: 4294967296 is too large for a port"),
        ({"rank": 2**32}, "ValueError: smddp: 4294967296 is too large for a rank"),
        ({"size": 1.0}, "TypeError: smddp: 1.0 is no integer: a number of ranks is one"),
        ({"timeout": "5"}, "TypeError: smddp: a timeout is a number of seconds, not '5'"),
        ({"timeout": None}, "TypeError: smddp: a timeout is a number of seconds, not None"),
        ({"host": 5}, "TypeError: smddp: a host is a string, not 5"),
    ]:
        found = message_of(lambda given=arguments: smddp.numpy.init(**given))
        assert found.startswith(text), found
    for name in ("RANK", "WORLD_SIZE"):
        os.environ[name] = "x"
        found = message_of(smddp.numpy.init)
        assert found.startswith(f"ValueError: smddp: {name}='x' in the environment"), found
        del os.environ[name]
    assert smddp.numpy.init().size == 1


@on_ranks("1")
def test_a_job_whose_ranks_do_not_meet() -> None:
    threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        smddp.numpy.init(0, 2, "127.0.0.1", timeout=100)
    with pytest.raises(smddp.numpy.CollectiveTimeoutError, match="nobody serves the store"):
        smddp.numpy.init(1, 2, "127.0.0.1", timeout=0.5)
    for arguments, text in [
        ((2, 2, "127.0.0.1"), "rank 2 is no rank of a job of 2"),
        ((0, 2, "no-such-host.invalid", 29600, 1.0), "no address of host"),
        ((1, 2, "no-such-host.invalid", 29600, 1.0), "no address of host"),
        ((0, 2, "127.0.0.1", 70000), "the port is not between"),
        ((0, 1, "127.0.0.1", 0, 0.0), "the time-out is 0"),
    ]:
        with pytest.raises(ValueError, match=text):
            smddp.numpy.init(*arguments)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(smddp.numpy.TransportError, match="cannot serve the store"):
            smddp.numpy.init(0, 2, "127.0.0.1", taken.getsockname()[1], timeout=5)
        with pytest.raises(smddp.numpy.CollectiveTimeoutError, match="does not answer"):
            smddp.numpy.init(1, 2, "127.0.0.1", taken.getsockname()[1], timeout=0.5)


def failing_to_meet(how: str, wrong: int, comes_after: float) -> tuple[str, float]:
    """Rank `wrong` fails so; rank 0 comes so much later than the others, or earlier if negative.

    Returns the error of this rank, and how many seconds after its call it came.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    time.sleep(max(0, comes_after) if rank == 0 else max(0, -comes_after))
    if rank == wrong and how == "setting":
        os.environ["SMDDP_IN_FLIGHT"] = "many"
    if rank == wrong and how == "size":
        size += 1
    if how == "interrupt":
        size += 1  # one never comes
        if rank == wrong:
            threading.Timer(1.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    began = time.monotonic()
    try:
        smddp.numpy.init(rank, size, timeout=30)
    except BaseException as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - began
    raise AssertionError("no error")


@pytest.mark.parametrize("comes_after", [1.0, -0.7])
@pytest.mark.parametrize(
    ("how", "wrong", "text"),
    [
        ("setting", 0, "ValueError: smddp: .*SMDDP_IN_FLIGHT"),
        ("setting", 1, "ValueError: smddp: .*SMDDP_IN_FLIGHT"),
        ("size", 0, "CollectiveMismatchError: smddp: .* groups of .* ranks"),
        ("size", 2, "CollectiveMismatchError: smddp: .* groups of .* ranks"),
        ("interrupt", 0, "AbortedError: smddp: rank 0 .*was interrupted by a signal"),
        ("interrupt", 1, "AbortedError: smddp: rank 1 .*was interrupted by a signal"),
    ],
)
def test_all_ranks_hear_why_they_do_not_meet(
    how: str, wrong: int, text: str, comes_after: float
) -> None:
    results = ranks.check_ranks(failing_to_meet, "3", how, wrong, comes_after)
    for rank, (error, seconds) in enumerate(results):
        if how == "interrupt" and rank == wrong:
            assert error.startswith("KeyboardInterrupt"), error
        else:
            assert re.match(text, error), f"rank {rank}: {error}"
        assert seconds < 10, f"rank {rank}: {seconds} s"


def with_strangers() -> None:
    """While ranks meet, others send the store what are no requests."""
    port = int(os.environ["STORE"])
    if os.environ["RANK"] == "0":

        def disturb() -> None:
            for data in (b"GET / HTTP/1.1\r\n\r\n" * 100, struct.pack("<I", 2**31), b"\x01" * 3):
                deadline = time.monotonic() + 20
                while time.monotonic() < deadline:
                    try:
                        stranger = socket.create_connection(("127.0.0.1", port), 5)
                        break
                    except OSError:
                        time.sleep(0.01)
                stranger.sendall(data)
                stranger.close()

        thread = threading.Thread(target=disturb)
        thread.start()
    else:
        time.sleep(1)  # the store is there, and is disturbed
    world = smddp.numpy.init(port=port, timeout=30)
    assert world.allreduce(np.ones(3)).tolist() == [2, 2, 2]
    world.leave()


def test_strangers_are_disconnected() -> None:
    with ranks.reserved_port() as port:
        ranks.check_ranks(with_strangers, "2", env={"STORE": str(port)})


# --- without torch --------------------------------------------------------------------------------

PROGRAM = """
import sys
import numpy
import smddp.numpy
world = smddp.numpy.init()
x = world.allreduce(numpy.arange(4.0) + world.rank)
world.leave()
assert "torch" not in sys.modules
print(x.tolist())
"""


def outputs(commands: list[list[str]]) -> list[str]:
    """Runs the ranks of a job, and returns what they print."""
    with ranks.reserved_port() as port:
        job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        job["WORLD_SIZE"] = str(len(commands))
        processes = [
            subprocess.Popen(
                command,
                env={**os.environ, **job, "RANK": str(rank)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank, command in enumerate(commands)
        ]
        found = []
        for process in processes:
            out, _ = process.communicate(timeout=60)
            assert process.returncode == 0
            found.append(out)
        return found


@pytest.mark.parametrize("count", [1, 2])
def test_a_process_without_torch(count: int, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    total = sum(np.arange(4.0) + rank for rank in range(count)).tolist()
    for out in outputs([[sys.executable, str(script)]] * count):
        assert out.strip() == str(total)


def test_a_killed_rank_of_smddprun_has_written_its_lines() -> None:
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    script = (
        "import os, smddp.numpy; smddp.numpy.init(0, 1); print('epoch', 1); os.kill(os.getpid(), 9)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], env=variables | {"SMDDPRUN": "1"},
        stdout=subprocess.PIPE, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stdout) == (-signal.SIGKILL, "epoch 1\n")


def programs(language: str) -> list[str]:
    page = (ranks.ROOT / "docs" / "numpy.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


def test_the_python_program_of_the_page(tmp_path: Path) -> None:
    (text,) = programs("python")
    script = tmp_path / "program.py"
    script.write_text(text)
    first, second = outputs([[sys.executable, str(script)]] * 2)
    assert first == "[2. 2. 2. 2. 2.] 0.5\n"
    assert second == ""


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_the_c_program_of_the_page(tmp_path: Path) -> None:
    (text,) = programs("c")
    source, program = tmp_path / "program.c", tmp_path / "program"
    library = ranks.ROOT / "smddp" / "lib" / "libsmddp.so"
    command = ["cc", "-Wall", "-Wextra", "-Werror", "-std=c99", str(source), str(library)]
    command += ["-I", str(ranks.ROOT / "csrc" / "c_interface"), f"-Wl,-rpath,{library.parent}"]
    with ranks.reserved_port() as port:
        source.write_text(text.replace("29600", str(port)))
        subprocess.run([*command, "-o", str(program)], check=True)
        assert outputs([[str(program)]] * 2) == ["2 4 6\n"] * 2
