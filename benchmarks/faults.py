"""Measures how long the other ranks wait for their error when one rank fails, and what it says.

    sudo python benchmarks/faults.py --trials 20 --json FILE
    sudo python benchmarks/faults.py --trials 20 --interruptions --json FILE

Four ranks run on two hosts, which are namespaces (tools/hosts.py, needs root). They reduce tensors
until one of them fails. The same script runs with every backend. The figure of a trial is the time
from the fault to the error of the last surviving rank.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import platform
import re
import resource
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "python"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

import hosts
import ranks
import torch
import torch.distributed as dist
from interleaved import parsed

import smddp  # noqa: F401  registers the backend
from smddp.bench.about import write_json

LAYOUT = "2x2"
CULPRIT = 1
TIMEOUT = 5.0
ELEMENTS = 25_000


class Told(NamedTuple):
    """The error of one surviving rank."""

    at: float | None  # time.monotonic() of the error; None: the call returned without one
    kind: str
    text: str
    reported: float | None  # time.monotonic() of the first log line about the rank at fault


@dataclasses.dataclass
class Scene:
    """One trial on one rank: everything that a fault needs."""

    network: hosts.Network
    clock: Path  # file with the time of the fault
    tensor: torch.Tensor
    store_pid: int

    @property
    def is_culprit(self) -> bool:
        """Whether this rank is the one that fails."""
        return dist.get_rank() == CULPRIT

    def start_clock(self) -> None:
        """Records the time of the fault: now."""
        self.clock.write_text(repr(time.monotonic()))

    def reduce_forever(self) -> None:
        """Calls all_reduce until it raises an error."""
        while True:
            dist.all_reduce(self.tensor)

    def fail_while_reducing(self, fault: Callable[[], Any]) -> None:
        """Lets the rank at fault fail while the others are in an all_reduce."""
        if self.is_culprit:
            time.sleep(0.2)
            self.start_clock()
            fault()
        self.reduce_forever()

    def mismatch(self, mine: Callable[[], Any], culprits: Callable[[], Any]) -> None:
        """Lets the rank at fault make another call than the others, after them."""
        if self.is_culprit:
            time.sleep(0.1)
            self.start_clock()
            culprits()
        else:
            mine()


def _stop_for(seconds: float) -> None:
    if os.fork() == 0:
        time.sleep(seconds)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)
    os._exit(0)


def _raise() -> None:
    raise RuntimeError("the training script has a bug")


def _heavy(scene: Scene) -> None:
    # The kernel frees the memory of a dead process before it closes its sockets.
    ballast = torch.ones(1 << 28) if scene.is_culprit else None
    dist.barrier()
    scene.fail_while_reducing(lambda: os.kill(os.getpid(), signal.SIGKILL))
    del ballast


def _swapped(scene: Scene) -> None:
    small, big = torch.ones(100), torch.ones(10_000)
    order = [small, big]
    scene.mismatch(
        lambda: [dist.all_reduce(tensor) for tensor in order],
        lambda: [dist.all_reduce(tensor) for tensor in reversed(order)],
    )


def _cut(how: str) -> Callable[[Scene], Any]:
    return lambda scene: scene.fail_while_reducing(lambda: scene.network.cut(1, how))


def _without_descriptors(scene: Scene) -> None:
    def exhaust() -> None:
        used = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used, used))
        dist.new_group(ranks=None)

    scene.mismatch(lambda: dist.all_reduce(torch.ones(1), group=dist.new_group()), exhaust)


def _kill_store(scene: Scene) -> None:
    if dist.get_rank() == 0:
        scene.start_clock()
        os.kill(scene.store_pid, signal.SIGKILL)
    dist.barrier()
    dist.new_group()


class Fault(NamedTuple):
    """One row of the table."""

    what: str
    act: Callable[[Scene], Any]
    reported: bool = False  # the log names the rank at fault before the call times out
    culprit: str = rf"\brank {CULPRIT}\b(?!/)"  # but not "on rank 1/4", the rank with the error
    all_survive: bool = False


def _reduce(**changes: Any) -> Callable[[], Any]:
    def call() -> None:
        tensor = torch.ones(changes.get("count", ELEMENTS), dtype=changes.get("dtype"))
        dist.all_reduce(tensor, changes.get("op", dist.ReduceOp.SUM))

    return call


_ANY_RANK = r"\brank [0-3] \(pid"

FAULTS = {
    "kill": Fault(
        "killed (SIGKILL)",
        lambda scene: scene.fail_while_reducing(lambda: os.kill(os.getpid(), signal.SIGKILL)),
    ),
    "kill-1gib": Fault("killed, with 1 GiB of memory", _heavy),
    "exit": Fault("exits", lambda scene: scene.fail_while_reducing(lambda: os._exit(3))),
    "raise": Fault("raises an exception", lambda scene: scene.fail_while_reducing(_raise)),
    "stop": Fault(
        "stopped (SIGSTOP)",
        lambda scene: scene.fail_while_reducing(lambda: _stop_for(TIMEOUT + 3)),
        reported=True,
    ),
    "late": Fault(
        "does not make the call",
        lambda scene: scene.fail_while_reducing(lambda: time.sleep(TIMEOUT + 3)),
    ),
    "skip": Fault(
        "skips a call",
        lambda scene: scene.mismatch(
            lambda: (_reduce()(), dist.broadcast(torch.ones(10), 0)),
            lambda: dist.broadcast(torch.ones(10), 0),
        ),
    ),
    "order": Fault("swaps two calls", _swapped),
    "collective": Fault(
        "makes another call",
        lambda scene: scene.mismatch(_reduce(), lambda: dist.broadcast(torch.ones(ELEMENTS), 0)),
    ),
    "op": Fault(
        "another operation",
        lambda scene: scene.mismatch(_reduce(), _reduce(op=dist.ReduceOp.MAX)),
    ),
    "root": Fault(
        "another root",
        lambda scene: scene.mismatch(
            lambda: dist.broadcast(torch.ones(ELEMENTS), 0),
            lambda: dist.broadcast(torch.ones(ELEMENTS), 1),
        ),
    ),
    "dtype": Fault(
        "another dtype",
        lambda scene: scene.mismatch(_reduce(), _reduce(dtype=torch.int32)),
    ),
    "size": Fault(
        "another size",
        lambda scene: scene.mismatch(_reduce(), _reduce(count=ELEMENTS + 1)),
    ),
    "cable": Fault("its host is cut off", _cut("both"), True, _ANY_RANK, all_survive=True),
    "deaf": Fault("its host hears nothing", _cut("to"), True, _ANY_RANK, all_survive=True),
    "mute": Fault("nobody hears its host", _cut("from"), True, _ANY_RANK, all_survive=True),
    "descriptors": Fault("runs out of descriptors", _without_descriptors),
    "store": Fault(
        "loses the store, then makes a group", _kill_store, culprit="the store", all_survive=True
    ),
}


def _watch_log(found: list[float]) -> None:
    """Forwards stderr, and records when a process was first called stopped or out of reach."""
    reader, writer = os.pipe()
    real = os.dup(2)
    os.dup2(writer, 2)

    def pass_on() -> None:
        with os.fdopen(reader, "rb") as lines:
            for line in lines:
                if (b"stopped" in line or b"cannot be reached" in line) and not found:
                    found.append(time.monotonic())
                os.write(real, line)

    threading.Thread(target=pass_on, daemon=True).start()


def _serve_store() -> tuple[dist.Store, int]:
    """Starts a process that serves the store, on rank 0.

    Returns:
        A client of the store, and the id of the process (0 on other ranks).
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    server = 0
    if os.environ["RANK"] == "0":
        owner = os.getpid()
        server = os.fork()
        if server == 0:
            kept = dist.TCPStore(address, port, is_master=True, wait_for_workers=False)
            while os.getppid() == owner:
                time.sleep(0.1)
            del kept
            os._exit(0)
    wait = timedelta(seconds=TIMEOUT)
    return dist.TCPStore(address, port, is_master=False, timeout=wait), server


def meet(backend: str, name: str, network: hosts.Network, clock: Path) -> Told:
    """Runs one rank of a trial."""
    reported: list[float] = []
    if FAULTS[name].reported:
        _watch_log(reported)
    store, store_pid = _serve_store()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    wait = timedelta(seconds=TIMEOUT)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=wait)
    scene = Scene(network, clock, torch.ones(ELEMENTS), store_pid)
    for _ in range(3):
        dist.all_reduce(scene.tensor)
    dist.barrier()
    try:
        FAULTS[name].act(scene)
    except Exception as error:
        if scene.is_culprit and name == "raise":
            raise
        first = reported[0] if reported else None
        return Told(time.monotonic(), type(error).__name__, str(error), first)
    return Told(None, "", "", None)


@dataclasses.dataclass
class Trial:
    """The result of one trial."""

    seconds: float | None  # until the last surviving rank had its error; None: not all had one
    outcome: str  # class of the error, or what happened instead
    named: bool  # whether all errors name the rank at fault
    text: str
    reported: float | None  # seconds until the last log named the rank at fault


def run(backend: str, name: str, folder: Path) -> Trial:
    """Runs one trial."""
    clock = folder / "clock"
    clock.unlink(missing_ok=True)
    with hosts.Hosts(2) as network:
        outcomes = ranks.run_ranks(
            meet, LAYOUT, backend, name, network, clock, network=network, timeout=30
        )
    started = float(clock.read_text())
    fault = FAULTS[name]
    survivors = [o for o in outcomes if o.rank != CULPRIT or fault.all_survive]
    for outcome in survivors:
        if not outcome.returned:
            how = f"process ends with {outcome.status}" if outcome.status else "no answer"
            return Trial(None, how, False, outcome.stderr[-300:], None)
    told = [outcome.value for outcome in survivors]
    silent = [one for one in told if one.at is None]
    if silent:
        return Trial(None, f"no error on {len(silent)} of {len(told)}", False, "", None)
    named = all(re.search(fault.culprit, one.text) for one in told)
    reports = [one.reported - started for one in told if one.reported is not None]
    return Trial(
        max(one.at for one in told) - started,
        sorted({one.kind for one in told})[0],
        named,
        told[0].text,
        max(reports) if len(reports) == len(told) else None,
    )


class Ride(NamedTuple):
    """What one rank saw of some interruptions of a link."""

    survived: int  # interruptions during which no call failed
    pauses: list[float]  # the longest call after each of them began, in seconds
    is_right: bool  # all sums were right
    text: str  # of the error


def ride_out(backend: str, network: hosts.Network, how: str, seconds: float, count: int) -> Ride:
    """Reduces tensors on one rank, while rank 0 interrupts the link of host 1 several times."""
    dist.init_process_group(backend, timeout=timedelta(seconds=30))
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor, more = torch.empty(ELEMENTS), torch.ones(1)
    dist.barrier()
    healed, pauses, is_right = 0, [0.0], True

    def interrupt() -> None:
        nonlocal healed
        for _ in range(count):
            time.sleep(0.3)
            network.interrupt(1, how, seconds)
            time.sleep(0.5 + 1.5 * seconds)
            healed += 1

    if rank == 0:
        threading.Thread(target=interrupt, daemon=True).start()
    try:
        while more >= 0:
            tensor.fill_(rank + 1)
            started = time.monotonic()
            dist.all_reduce(tensor)
            pauses[-1] = max(pauses[-1], time.monotonic() - started)
            is_right &= bool((tensor == size * (size + 1) / 2).all())
            more.fill_(healed if healed < count else -1)
            dist.broadcast(more, 0)
            if int(more) not in (len(pauses) - 1, -1):
                pauses.append(0.0)
    except Exception as error:
        return Ride(len(pauses) - 1, pauses[:-1], is_right, str(error))
    return Ride(count, pauses, is_right, "")


def ride(backend: str, how: str, seconds: float, trials: int) -> dict[str, Any]:
    """Interrupts the link of a host; a job that dies of it is followed by another one."""
    survived, pauses, is_right, texts = 0, [], True, []
    left = trials
    while left > 0:
        with hosts.Hosts(2) as network:
            rides = ranks.check_ranks(
                ride_out,
                LAYOUT,
                backend,
                network,
                how,
                seconds,
                left,
                network=network,
                timeout=60 + left * (5 + 4 * seconds),
            )
        done = min(one.survived for one in rides)
        survived += done
        pauses += [
            max(several) for several in zip(*(one.pauses[:done] for one in rides), strict=False)
        ]
        is_right &= all(one.is_right for one in rides)
        texts += [one.text for one in rides if one.text][:1]
        left -= done + (done < left)
    pauses.sort()
    return {
        "trials": trials,
        "survived": survived,
        "right": is_right,
        "pause_p50": statistics.median(pauses) if pauses else None,
        "pause_max": pauses[-1] if pauses else None,
        "texts": texts[:1],
    }


def _interruptions(backends: list[str], trials: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for how, where in (("both", "both directions"), ("to", "to the host"), ("from", "from it")):
        for seconds in (0.5, 1, 2):
            row = f"{where}, {seconds} s"
            results[row] = {backend: ride(backend, how, seconds, trials) for backend in backends}
            cells = [
                f"{one['survived']} of {one['trials']}, {_show(one['pause_p50'])} / "
                f"{_show(one['pause_max'])}"
                for one in results[row].values()
            ]
            print(f"| {row} | {' | '.join(cells)} |", flush=True)
    return results


def _summary(trials: list[Trial]) -> dict[str, Any]:
    seconds = sorted(trial.seconds for trial in trials if trial.seconds is not None)
    reports = sorted(trial.reported for trial in trials if trial.reported is not None)

    def point(values: list[float], share: float) -> float | None:
        return values[min(len(values) - 1, int(share * len(values)))] if values else None

    return {
        "trials": len(trials),
        "with_error": len(seconds),
        "p50": statistics.median(seconds) if seconds else None,
        "p99": point(seconds, 0.99),
        "reported_p50": statistics.median(reports) if reports else None,
        "reported_p99": point(reports, 0.99),
        "outcomes": sorted({trial.outcome for trial in trials}),
        "named": sum(trial.named for trial in trials),
        "text": trials[0].text,
    }


def _show(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _cells(summary: dict[str, Any]) -> str:
    times = f"{_show(summary['p50'])} / {_show(summary['p99'])}"
    if summary["reported_p50"] is not None:
        reported = f"{_show(summary['reported_p50'])} / {_show(summary['reported_p99'])}"
        times += f"; in the log after {reported}"
    named = "named" if summary["named"] == summary["trials"] else "not named"
    outcome = ", ".join(summary["outcomes"])
    return f"{times} | {outcome}{f', {named}' if summary['with_error'] else ''}"


def table(results: dict[str, dict[str, Any]]) -> str:
    """Returns the figures as a table in Markdown, one row per fault."""
    names = list(next(iter(results.values())))
    lines = ["| one rank … |", "|---|"]
    for backend in results:
        lines[0] += f" {backend}: p50 / p99 | the survivors get |"
        lines[1] += "---|---|"
    for name in names:
        cells = " | ".join(_cells(results[backend][name]) for backend in results)
        lines.append(f"| {FAULTS[name].what} | {cells} |")
    return "\n".join(lines)


def main() -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="faults.py", description=__doc__)
    parser.add_argument("--backends", default="smddp,gloo", help="default: smddp,gloo")
    parser.add_argument("--faults", default=",".join(FAULTS), help=f"some of {', '.join(FAULTS)}")
    parser.add_argument("--trials", type=int, default=20, help="per fault and backend (default 20)")
    parser.add_argument(
        "--interruptions", action="store_true", help="measure links that heal instead"
    )
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parsed(parser)
    reason = hosts.unavailable()
    if reason is not None:
        parser.exit(2, f"faults.py: {reason}\n")
    backends, names = options.backends.split(","), options.faults.split(",")
    unknown = [name for name in names if name not in FAULTS]
    if unknown:
        parser.exit(2, f"faults.py: no such fault: {', '.join(unknown)}\n")
    results: dict[str, Any] = {backend: {} for backend in backends}
    if options.interruptions:
        names = []
        results = _interruptions(backends, options.trials)
    for name in names:
        for backend in backends:
            with tempfile.TemporaryDirectory() as folder:
                trials = [run(backend, name, Path(folder)) for _ in range(options.trials)]
            results[backend][name] = _summary(trials)
            print(f"{name}, {backend}: {_cells(results[backend][name])}", file=sys.stderr)
    if names:
        print(table(results))
    if options.json is not None:
        about = {
            "machine": platform.platform(),
            "torch": torch.__version__,
            "arguments": vars(options) | {"json": None},
            "timeout_s": TIMEOUT,
            "results": results,
        }
        write_json(options.json, about)
    return 0


if __name__ == "__main__":
    # The ranks import this file by its name, so functions must not belong to __main__.
    import faults

    sys.exit(faults.main())
