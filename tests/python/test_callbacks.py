"""Futures of calls and their callbacks; hooks of a group.

A callback may wait for anything, also for a thread that makes other calls. So it runs on a thread
of smddp, or in the wait for its own call, where gloo has run it before, too. Its collectives have
an order of their own.
"""

from __future__ import annotations

import copy
import os
import random
import signal
import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import nn

pytestmark = pytest.mark.multiprocess
layouts = pytest.mark.parametrize("layout", ["2", "1+1"])
hooks = pytest.mark.skipif(
    not hasattr(torch._C._distributed_c10d.Backend, "register_abort_hook"),
    reason="this torch has no hooks",
)


def _callback_waits_for_a_caller() -> None:
    with ranks.job():
        # The call ends while this thread makes the next one, which the callback waits for.
        for count in (10, 100_000):
            if dist.get_rank() != 0:
                time.sleep(0.3)  # so that the call is open when rank 0 adds its callback
            made, ran = threading.Event(), threading.Event()

            def wait(_: object, made: threading.Event = made, ran: threading.Event = ran) -> None:
                assert made.wait(60)
                ran.set()

            first = dist.all_reduce(torch.ones(count), async_op=True)
            if dist.get_rank() == 0:
                first.get_future().add_done_callback(wait)
            second = dist.all_reduce(torch.ones(count), async_op=True)
            dist.barrier()
            made.set()
            second.wait()
            assert dist.get_rank() != 0 or ran.wait(60)


def _callback_takes_the_lock_of_a_caller() -> None:
    with ranks.job():
        lock, done, works = threading.Lock(), [], []

        def note(_: object) -> None:
            with lock:
                done.append(1)

        for _ in range(300):
            with lock:
                work = dist.all_reduce(torch.ones(100), async_op=True)
            work.get_future().add_done_callback(note)
            works.append(work)
        for work in works:
            work.wait()
        deadline = time.monotonic() + 60
        while len(done) < len(works) and time.monotonic() < deadline:
            time.sleep(0.001)
        assert len(done) == len(works)


def _future_is_complete_after_the_wait() -> None:
    with ranks.job():
        size = float(dist.get_world_size())
        for number in range(200):
            work = dist.all_reduce(torch.ones(1 + number % 7 * 5000), async_op=True)
            future = work.get_future()
            if number % 2:
                work.wait()
            else:
                while not work.is_completed():
                    time.sleep(0)
            assert future.done()
            assert future.value()[0][0] == size
            # Within a callback, too.
            inside = future.then(lambda f, work=work: (work.wait(), f.value()[0][0].item())[1])
            assert inside.wait() == size


@layouts
@pytest.mark.parametrize(
    "cases",
    [
        _callback_waits_for_a_caller,
        _callback_takes_the_lock_of_a_caller,
        _future_is_complete_after_the_wait,
    ],
)
def test_callbacks(layout: str, cases: Callable[[], None]) -> None:
    ranks.check_ranks(cases, layout)


# --- collectives that callbacks make
# -------------------------------------------------------------------------------


class _Program:
    """Random collectives in callbacks of futures, which must come in one order on all ranks.

    All ranks draw the same calls; each waits at other places. A call sums ones that are multiplied
    by a number which no other call has, so a call that meets another one gives a wrong sum.
    """

    def __init__(self, seed: int, groups: list[dist.ProcessGroup]) -> None:
        self.shape = random.Random(seed)
        self.delays = random.Random(f"{seed} {dist.get_rank()}")
        self.groups = groups
        self.number = 0
        self.futures: list[torch.futures.Future[None]] = []

    def delay(self) -> None:
        if self.delays.random() < 0.3:
            time.sleep(self.delays.random() * 0.003)

    def plan(self, depth: int) -> dict[str, object]:
        """Returns what a call does, and what its callback calls, to at most that depth."""
        self.number += 1
        inner = self.shape.randrange(3) if depth else 0
        return {
            "kind": self.shape.choice(["all_reduce", "reduce_scatter", "all_gather", "uneven"]),
            "how": self.shape.choice(["sync", "future", "work"]),
            "attach": self.shape.choice(["then", "add", "collect"]),
            "group": self.shape.choice(self.groups),
            "number": self.number,
            "inner": [self.plan(depth - 1) for _ in range(inner)],
        }

    def begin(self, call: Any) -> tuple[dist.Work, Callable[[], None]]:
        """Makes a call; returns it with a check of its result."""
        group, number = call["group"], float(call["number"])
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        length = 1 + call["number"] % 5 * 4000
        ones = torch.full((length * size,), number)
        if call["kind"] == "all_reduce":
            work = dist.all_reduce(ones, group=group, async_op=True)
            out, want = ones, number * size
        elif call["kind"] == "reduce_scatter":
            out, want = torch.empty(length), number * size
            work = dist.reduce_scatter_tensor(out, ones, group=group, async_op=True)
        elif call["kind"] == "all_gather":
            out, want = torch.empty(length * size), number
            work = dist.all_gather_into_tensor(out, ones[:length], group=group, async_op=True)
        else:  # made of messages
            sizes = [[1 + (a + b) % 3 for b in range(size)] for a in range(size)]
            out, want = torch.empty(sum(row[rank] for row in sizes)), number
            given = torch.full((sum(sizes[rank]),), number)
            work = dist.all_to_all_single(
                out, given, [row[rank] for row in sizes], sizes[rank], group, async_op=True
            )

        def check() -> None:
            assert (out == want).all(), f"call {call['number']}: {out[:3]}, expected {want}"

        return work, check

    def inner(self, call: Any) -> None:
        """What the callback of a call does."""
        self.delay()
        for each in call["inner"]:
            work, check = self.begin(each)
            if each["inner"]:
                self.attach(work, check, each)
            elif each["how"] == "future":
                work.get_future().wait()
            else:
                work.wait()
            if not each["inner"]:
                check()

    def attach(self, work: dist.Work, check: Callable[[], None], call: Any) -> None:
        done: torch.futures.Future[None] = torch.futures.Future()
        self.futures.append(done)

        def run(_: object) -> None:
            try:
                check()
                self.inner(call)
                done.set_result(None)
            except BaseException as error:
                done.set_exception(error)

        future = work.get_future()
        self.delay()
        if call["attach"] == "then":
            future.then(run)
        elif call["attach"] == "add":
            future.add_done_callback(run)
        else:
            torch.futures.collect_all([future]).then(run)

    def run(self) -> None:
        for _ in range(12):
            call = self.plan(2)
            self.delay()
            work, check = self.begin(call)
            if call["inner"]:
                self.attach(work, check, call)
            elif call["how"] != "sync" or self.shape.random() < 0.5:
                work.wait()
                check()
        while self.futures:
            self.futures.pop(0).wait()


def _random_programs(seeds: list[int]) -> None:
    with ranks.job():
        others = [dist.new_group(list(range(dist.get_world_size()))) for _ in range(2)]
        for seed in seeds:
            _Program(seed, [dist.group.WORLD, *others]).run()
            dist.barrier()


def _waits_in_another_order() -> None:
    """Each rank waits for the calls in another order. Their callbacks still run in one."""
    with ranks.job():
        sums: dict[str, float] = {}

        def add(name: str, value: float) -> Callable[[Any], None]:
            def run(_: Any) -> None:
                tensor = torch.full((8,), value)
                dist.all_reduce(tensor)
                sums[name] = float(tensor[0])

            return run

        for _ in range(100):
            sums.clear()
            works = [dist.all_reduce(torch.ones(8), async_op=True) for _ in range(3)]
            futures = [
                work.get_future().then(add(str(number), 10.0**number))
                for number, work in enumerate(works)
            ]
            for number in range(3):
                works[(number + dist.get_rank()) % 3].wait()
            for future in futures:
                future.wait()
            expected = {str(number): 10.0**number * dist.get_world_size() for number in range(3)}
            assert sums == expected


@layouts
def test_callbacks_of_calls_that_ranks_wait_for_in_any_order(layout: str) -> None:
    ranks.check_ranks(_waits_in_another_order, layout)


@layouts
def test_collectives_in_callbacks(layout: str) -> None:
    seeds = ranks.rotating_or_all(list(range(200)), 10)
    print("seeds", seeds)
    ranks.check_ranks(_random_programs, layout, seeds, timeout=300)


def _mean(model: nn.Module, data: Callable[[int], torch.Tensor]) -> list[torch.Tensor]:
    """Returns the mean of all ranks' gradients, computed alone."""
    sums = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for rank in range(dist.get_world_size()):
        model.zero_grad()
        model(data(rank)).square().sum().backward()
        for total, parameter in zip(sums, model.parameters(), strict=True):
            assert parameter.grad is not None
            total += parameter.grad
    return [total / dist.get_world_size() for total in sums]


def _nested(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Sums twice; the second sum is made and waited for in a callback."""
    size = dist.get_world_size()

    def again(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        work = dist.all_reduce(future.value()[0].clone(), async_op=True)
        total: torch.Tensor = work.get_future().wait()[0]
        return total / size

    work = dist.all_reduce(bucket.buffer().div_(size), async_op=True)
    return work.get_future().then(again)  # type: ignore[no-any-return]


def _scatter_and_gather(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    size, grads = dist.get_world_size(), bucket.buffer()
    length = -(-grads.numel() // size)
    padded, part, full = torch.zeros(length * size), torch.empty(length), torch.empty(length * size)
    padded[: grads.numel()] = grads

    def gather(_: object) -> torch.Tensor:
        dist.all_gather_into_tensor(full, part.div_(size))
        return full[: grads.numel()]

    work = dist.reduce_scatter_tensor(part, padded, async_op=True)
    return work.get_future().then(gather)  # type: ignore[no-any-return]


# torch compares annotations of hooks, which are texts here.
for _hook in (_nested, _scatter_and_gather):
    _hook.__annotations__.clear()


@layouts
@on_ranks("{layout}")
def test_optimizers_that_step_in_callbacks(layout: str) -> None:
    """The hook broadcasts parameters in callbacks of the gradients' sums."""
    from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook, default_hooks
    from torch.distributed.optim import ZeroRedundancyOptimizer

    warnings.simplefilter("ignore")  # of TorchScript
    with ranks.job():
        rank, size = dist.get_rank(), dist.get_world_size()
        layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh())]
        alone = nn.Sequential(*layers)
        model = nn.parallel.DistributedDataParallel(
            copy.deepcopy(alone), bucket_cap_mb=0.02, gradient_as_bucket_view=True
        )
        divided = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.SGD, lr=0.1, overlap_with_ddp=True
        )
        hook = ddp_zero_hook.hook_with_zero_step_interleaved(
            default_hooks.allreduce_hook, model, divided
        )
        model.register_comm_hook(None, hook)
        whole = torch.optim.SGD(alone.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(1)
        for step in range(8):
            time.sleep(0.002 * ((rank + step) % 3))
            batch = torch.randn(size, 8, 64, generator=generator)
            if step > 0:
                model.zero_grad(set_to_none=False)
            model(batch[rank]).square().sum().backward()
            if step < 2:
                continue  # the hook changes nothing yet
            whole.zero_grad()
            (sum(alone(x).square().sum() for x in batch) / size).backward()
            whole.step()
        for one, other in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("layout", ["4", "2x2"])
@on_ranks("{layout}")
def test_hooks_of_ddp_make_collectives(layout: str) -> None:
    with ranks.job():
        from torch.distributed.algorithms.ddp_comm_hooks import (
            powerSGD_hook,
            quantization_hooks,
        )

        def power_sgd() -> object:  # of full rank, so that it loses nothing but digits
            return powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=32, start_powerSGD_iter=2, min_compression_rate=0.1
            )

        for hook, state, tolerance in (
            (_nested, None, 1e-6),
            (_scatter_and_gather, None, 1e-6),
            (powerSGD_hook.powerSGD_hook, power_sgd(), 2e-3),
            (quantization_hooks.quantization_pertensor_hook, dist.group.WORLD, 0.05),
        ):
            layers = [layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.Tanh())]
            alone = nn.Sequential(*layers)
            model = nn.parallel.DistributedDataParallel(copy.deepcopy(alone), bucket_cap_mb=0.01)
            model.register_comm_hook(state, hook)
            for step in range(4):

                def data(rank: int, step: int = step) -> torch.Tensor:
                    generator = torch.Generator().manual_seed(100 * step + rank)
                    return torch.randn(8, 32, generator=generator)

                want = _mean(alone, data)
                model.zero_grad()
                time.sleep(0.002 * ((dist.get_rank() + step) % 3))
                model(data(dist.get_rank())).square().sum().backward()
                for parameter, right in zip(model.parameters(), want, strict=True):
                    assert parameter.grad is not None
                    error = (parameter.grad - right).abs().max() / right.abs().max()
                    assert error < tolerance, (hook.__name__, step, error)


def _stray_in_a_callback() -> str:
    with ranks.job():
        count = 5 + dist.get_rank()

        def stray(_: object) -> None:
            dist.all_reduce(torch.ones(count))

        future = dist.all_reduce(torch.ones(3), async_op=True).get_future().then(stray)
        dist.barrier()  # the script's own calls are not concerned
        with pytest.raises(RuntimeError) as raised:
            future.wait()
        dist.barrier()
        return str(raised.value)


@layouts
def test_an_error_says_that_a_callback_made_the_call(layout: str) -> None:
    for said in ranks.check_ranks(_stray_in_a_callback, layout):
        assert "called by a callback" in said
        assert "5 float32" in said
        assert "6 float32" in said


def _end_with_an_open_receive() -> list[str]:
    said: list[str] = []
    ended = threading.Event()

    def note(future: torch.futures.Future[object]) -> None:
        try:
            future.value()
        except RuntimeError as error:
            said.append(str(error))
        ended.set()

    dist.init_process_group("smddp", timeout=timedelta(seconds=60))
    dist.irecv(torch.ones(1), 1 - dist.get_rank()).get_future().add_done_callback(note)
    dist.barrier()
    dist.destroy_process_group()
    assert ended.wait(30)
    return said


@layouts
def test_a_future_ends_with_its_group(layout: str) -> None:
    for said in ranks.check_ranks(_end_with_an_open_receive, layout):
        assert len(said) == 1
        assert "left the group" in said[0]


def _hooks() -> list[str]:
    ran: list[str] = []

    def fail() -> None:
        ran.append("fails")
        raise RuntimeError("of the hook")

    dist.init_process_group("smddp", timeout=timedelta(seconds=60))
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    backend.register_abort_hook(900_001, fail)
    backend.register_abort_hook(900_002, lambda: ran.append("works"))
    backend.abort()
    deadline = time.monotonic() + 30
    while "works" not in ran and time.monotonic() < deadline:
        time.sleep(0.001)
    return ran


@hooks
def test_a_hook_that_fails_stops_no_other() -> None:
    for ran in ranks.check_ranks(_hooks, "2"):
        assert {"fails", "works"} <= set(ran)


def _hook_of_a_failure(how: str) -> tuple[list[str], str]:
    said: list[str] = []
    caught, ended = threading.Event(), threading.Event()
    threads: list[str] = []

    def hook() -> None:
        name = Path(f"/proc/self/task/{threading.get_native_id()}/comm")
        threads.append(name.read_text().strip())
        # If the caller's error waited for the hook, this would be first.
        said.append("hook" if caught.wait(20) else "the error is late")
        ended.set()

    dist.init_process_group("smddp", timeout=timedelta(seconds=60))
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    backend.register_abort_hook(900_001, hook)
    dist.barrier()
    if dist.get_rank() == 1:
        os._exit(7)
    try:
        while True:
            dist.all_reduce(torch.ones(4), async_op=how == "waits").wait()
    except (dist.DistBackendError, AttributeError):
        said.append("error")
    for _ in range(3):  # each of them meets the same failure
        with pytest.raises(dist.DistBackendError):
            dist.barrier()
    if how == "destroys":
        dist.destroy_process_group()
    caught.set()
    assert ended.wait(30)
    time.sleep(0.05)
    return said, threads[0]


@hooks
@pytest.mark.parametrize("how", ["raises", "waits", "destroys"])
def test_a_hook_comes_after_the_error_and_once(how: str) -> None:
    outcomes = ranks.run_ranks(_hook_of_a_failure, "3", how)
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.value == (["error", "hook"], "smddp-hooks"), str(outcome)


def _hook_that_does_not_end(how: str) -> None:
    def hook() -> None:
        Path(os.environ["BEGUN"] + os.environ["RANK"]).touch()
        while True:
            time.sleep(0.01)

    dist.init_process_group("smddp", timeout=timedelta(seconds=60))
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    backend.register_abort_hook(900_001, hook)
    if how == "interrupt":
        begun = Path(os.environ["BEGUN"] + os.environ["RANK"])

        def interrupt() -> None:
            while not begun.exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt, daemon=True).start()
    backend.abort()
    raise SystemExit(3)


@hooks
@pytest.mark.parametrize(("how", "seconds"), [("interrupt", "86400"), ("wait", "1")])
def test_a_process_ends_despite_a_hook(how: str, seconds: str, tmp_path: Path) -> None:
    """The interpreter ends as it would without hooks: a thread in Python code would abort it."""
    env = {"SMDDP_DUMP_SECONDS": seconds, "BEGUN": str(tmp_path / "begun")}
    for outcome in ranks.run_ranks(_hook_that_does_not_end, "2", how, env=env, full_exit=True):
        assert outcome.status == 3, str(outcome)
        assert "SMDDP_DUMP_SECONDS" in outcome.stderr


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@on_ranks("2")
def test_an_error_while_coalescing_keeps_no_later_tensors() -> None:
    with ranks.job():
        with (
            pytest.raises(ValueError, match="99"),
            dist._coalescing_manager(device=torch.device("cpu")),
        ):
            dist.broadcast(torch.ones(3), 99)
        before = _resident()
        for _ in range(100):
            dist.broadcast(torch.ones(1 << 18), 0)
        assert _resident() - before < 30 << 20
