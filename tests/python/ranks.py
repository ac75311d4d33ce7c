"""Runs a function as the ranks of a job: real processes, which play one node or several.

Importing torch takes seconds, a fork takes milliseconds. So one child process, the *nursery*,
imports torch and smddp once, starts no thread, and forks the ranks of every run. A rank is a
complete process: it has its own environment, runs its exit handlers, and may be killed.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import faulthandler
import functools
import gc
import importlib
import importlib.util
import logging
import os
import pickle
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, NoReturn

import hosts
import torch
import torch.distributed as dist

from smddp._registration import leave_groups
from smddp.bench.launch import reserved_port

ROOT = Path(__file__).resolve().parents[2]


@dataclasses.dataclass
class Outcome:
    """How one rank ended."""

    rank: int
    pid: int
    status: int  # exit code, or minus the signal
    returned: bool = False
    value: Any = None
    trace: str = ""
    stdout: str = ""
    stderr: str = ""
    ended_at: float = 0.0  # time.monotonic() at its end
    processor: float = 0.0  # seconds of this rank and of its children that have ended
    pickled: bytes = b""  # (returned, value, trace); the nursery cannot unpickle their types

    def __str__(self) -> str:
        how = "returned" if self.returned else "did not return"
        return (
            f"--- rank {self.rank} (pid {self.pid}) {how}, exit status {self.status}\n"
            f"{self.trace}{self.stdout}{self.stderr}"
        )


@dataclasses.dataclass
class _Run:
    module: str
    file: str
    function: str
    arguments: tuple[Any, ...]
    environments: list[dict[str, str]]
    timeout: float
    full_exit: bool
    namespaces: list[hosts.Namespaces] | None  # of each rank
    modules: tuple[str, ...]


# --- in the process of pytest
# ---------------------------------------------------------------------------


def nodes_of(layout: str) -> list[int]:
    """Returns the ranks per node: "2" is one node, "2x3" two nodes of three, "2+1" uneven ones."""
    if "x" in layout:
        nodes, ranks = layout.split("x")
        return [int(ranks)] * int(nodes)
    return [int(ranks) for ranks in layout.split("+")]


def rotating(seeds: list[int], count: int) -> list[int]:
    """Returns some of the seeds: others with each TEST_TURN (docs/testing.md)."""
    first = int(os.environ.get("TEST_TURN", "0")) * count
    return [seeds[(first + i) % len(seeds)] for i in range(count)]


def rotating_or_all(seeds: list[int], count: int) -> list[int]:
    """As rotating(); all of the seeds with ALL_SEEDS, which `make test-all` sets."""
    return seeds if "ALL_SEEDS" in os.environ else rotating(seeds, count)


# For ranks in namespaces of their own. Below the kernel's range of ephemeral ports.
_PORT_IN_A_NETWORK = 29500


def run_ranks(
    function: Callable[..., Any],
    layout: str,
    *arguments: Any,
    timeout: float = 60,
    env: dict[str, str] | None = None,
    rank_0_serves: bool = False,
    full_exit: bool = False,
    network: hosts.Network | None = None,
    modules: Sequence[str] = (),
) -> list[Outcome]:
    """Runs `function(*arguments)` on every rank of a layout.

    Args:
        function: a function of a module. The ranks find it by file and name. Its result is pickled.
        layout: see nodes_of().
        arguments: pickled.
        timeout: seconds after which ranks that still run print their stacks and are killed.
        env: variables for all ranks.
        rank_0_serves: whether rank 0 serves the store, as in scripts started by hand, so the store
            ends with it; otherwise this process serves it, as with torchrun.
        full_exit: whether ranks shut the interpreter down, which takes a second with torch;
            otherwise they only run the exit handlers.
        network: has a host for each node of the layout, where its ranks run; rank 0 serves the
            store.
        modules: are imported before the fork, once for this run and all later ones. They must start
            no thread.

    Returns:
        How each rank ended. A rank that failed raises nothing here.
    """
    sizes = nodes_of(layout)
    common = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(sum(sizes))}
    if "TEST_PROVIDER" in os.environ:
        common["SMDDP_PROVIDER"] = os.environ["TEST_PROVIDER"]
    common |= env or {}
    environments = []
    namespaces = []
    for node, ranks in enumerate(sizes):
        for local in range(ranks):
            if network is not None:
                namespaces.append(network.hosts[node])
            environments.append(
                {
                    "RANK": str(len(environments)),
                    "LOCAL_RANK": str(local),
                    "LOCAL_WORLD_SIZE": str(ranks),
                    "SMDDP_NODE_ID": f"node{node}",
                }
            )
    with contextlib.ExitStack() as stack:
        if network is not None:
            common |= {"MASTER_ADDR": network.address(0), "MASTER_PORT": str(_PORT_IN_A_NETWORK)}
        elif rank_0_serves:
            common["MASTER_PORT"] = str(stack.enter_context(reserved_port()))
        else:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            common["MASTER_PORT"] = str(store.port)
            common["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        run = _Run(
            function.__module__,
            function.__code__.co_filename,
            function.__name__,
            arguments,
            [common | own for own in environments],
            timeout,
            full_exit,
            namespaces or None,
            tuple(modules),
        )
        outcomes = _nursery().run(run)
    global _processor
    for outcome in outcomes:
        _processor += outcome.processor
        if outcome.pickled:
            outcome.returned, outcome.value, outcome.trace = pickle.loads(outcome.pickled)
    return outcomes


_processor = 0.0


def processor_seconds() -> float:
    """Returns the processor time that this process and all its children and ranks have used."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return _processor + sum(one.ru_utime + one.ru_stime for one in used)


def check_ranks(function: Callable[..., Any], layout: str, *arguments: Any, **options: Any) -> Any:
    """Calls run_ranks(), asserts that no rank failed, and returns the ranks' results."""
    outcomes = run_ranks(function, layout, *arguments, **options)
    if any(not outcome.returned or outcome.status != 0 for outcome in outcomes):
        raise AssertionError("\n".join(str(outcome) for outcome in outcomes))
    return [outcome.value for outcome in outcomes]


class _Nursery:
    """The process that forks the ranks, for one run at a time. If it dies, so do the ranks."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(
            [
                str(ROOT),
                str(ROOT / "tools"),
                str(Path(__file__).parent),
                environment.get("PYTHONPATH", ""),
            ]
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", "import ranks; ranks.serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )

    def run(self, run: _Run) -> list[Outcome]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        _write(self.process.stdin, run)
        try:
            outcomes: list[Outcome] = _read(self.process.stdout)
        except BaseException:  # such as a time-out: the next run must not read this one's outcomes
            self.process.kill()
            self.close()
            _nursery.cache_clear()
            raise
        return outcomes

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:  # the machine is busy, and no test needs it any longer
            self.process.kill()
            self.process.wait()


@functools.cache
def _nursery() -> _Nursery:
    nursery = _Nursery()
    atexit.register(nursery.close)
    return nursery


def nursery_pids() -> set[int]:
    """Returns the processes that outlive a test: the nursery, if it has been started."""
    return {_nursery().process.pid} if _nursery.cache_info().currsize else set()


def _write(stream: BinaryIO, value: Any) -> None:
    data = pickle.dumps(value)
    stream.write(struct.pack("<Q", len(data)) + data)
    stream.flush()


def _read(stream: BinaryIO) -> Any:
    head = stream.read(8)
    if len(head) < 8:
        raise EOFError("the process that forks the ranks has ended")
    return pickle.loads(stream.read(struct.unpack("<Q", head)[0]))


# --- in the processes of the ranks
# ------------------------------------------------------------------------


# What ranks need, and what torch imports at its first comparison, profile, functional collective or
# optimizer: 900 modules, more than a second in every rank. Not smddp.torch._C, which belongs to a
# rank.
_IMPORTED_ONCE = ("pytest", "smddp", "torch._dynamo")


def serve() -> None:
    """Runs the nursery: forks ranks until the standard input ends."""
    for module in _IMPORTED_ONCE:
        importlib.import_module(module)
    # Otherwise each collection of garbage in a rank would write to these, and copy their pages.
    gc.freeze()
    # At its exit torch unregisters each of its operators, which takes a rank 0.1 s.
    forget_exit_handlers()

    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    while True:
        try:
            run = _read(requests)
        except EOFError:
            return
        _write(replies, _fork(run))


def forget_exit_handlers() -> None:
    """Lets this process and those that it forks do at their exit only what they register later."""
    atexit._clear()
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
    atexit.register(weakref.finalize._exitfunc)  # type: ignore[attr-defined]
    atexit.register(leave_groups)  # as the import of torch does


def _fork(run: _Run) -> list[Outcome]:
    """Forks the ranks of one run; returns how they ended. In the ranks it does not return."""
    for name in run.modules:
        importlib.import_module(name)
    # Imported once, here, for all ranks of all its tests.
    module = sys.modules.get(run.module) or _module(run.module, run.file)
    function = getattr(module, run.function)
    folder = Path(tempfile.mkdtemp(prefix="ranks-"))
    pids: dict[int, int] = {}
    # Another thread could hold a lock, such as the loader's, that a rank would wait for in vain.
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"{run.function}: an imported module has started a thread"
    for rank in range(len(run.environments)):
        pid = os.fork()
        if pid == 0:
            _be_rank(run, functools.partial(function, *run.arguments), rank, folder)
        pids[pid] = rank
    outcomes = _await(pids, run.timeout, folder)
    shutil.rmtree(folder)
    return outcomes


def _await(pids: dict[int, int], timeout: float, folder: Path) -> list[Outcome]:
    outcomes: dict[int, Outcome] = {}
    deadline = time.monotonic() + timeout
    late = False
    while len(outcomes) < len(pids):
        for pid, rank in pids.items():
            if rank in outcomes:
                continue
            ended, status, used = os.wait4(pid, os.WNOHANG)
            if ended:
                outcomes[rank] = Outcome(
                    rank,
                    pid,
                    os.waitstatus_to_exitcode(status),
                    ended_at=time.monotonic(),
                    processor=used.ru_utime + used.ru_stime,
                )
            elif time.monotonic() > deadline:
                # Print the stacks first, then kill.
                os.kill(pid, signal.SIGKILL if late else signal.SIGUSR1)
        if time.monotonic() > deadline:
            late = True
            time.sleep(1)
        time.sleep(0.002)
    for rank, outcome in outcomes.items():
        outcome.stdout = (folder / f"{rank}.out").read_text(errors="replace")
        outcome.stderr = (folder / f"{rank}.err").read_text(errors="replace")
        if late:
            outcome.stderr += f"\nthe run took longer than {timeout} s\n"
        with contextlib.suppress(FileNotFoundError):
            outcome.pickled = (folder / f"{rank}.value").read_bytes()
    return [outcomes[rank] for rank in sorted(outcomes)]


# In a rank: a folder that all ranks of its run share. It works even if their groups fail.
_folder = Path()


def _be_rank(run: _Run, work: Callable[[], Any], rank: int, folder: Path) -> NoReturn:
    global _folder
    _folder = folder
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(folder / f"{rank}.{name}", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        os.dup2(file, number)
        os.close(file)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.environ.update(run.environments[rank])
    dist.set_debug_level_from_env()  # the nursery's import of torch has read it before
    if run.namespaces is not None:
        run.namespaces[rank].enter()
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)

    def say(returned: bool, value: Any, trace: str) -> None:
        unfinished = folder / f"{rank}.part"
        unfinished.write_bytes(pickle.dumps((returned, value, trace)))
        unfinished.rename(folder / f"{rank}.value")

    code = 0
    try:
        say(True, work(), "")
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        say(False, None, traceback.format_exc())
        code = 1
    if run.full_exit:
        raise SystemExit(code)
    end(code)


def end(code: int) -> NoReturn:
    """Ends this process after its exit handlers, without taking the interpreter down."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _module(name: str, file: str) -> ModuleType:
    # Under the name that pytest uses, so that pytest can unpickle what the ranks return.
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


# --- functions for tests -------------------------------------------------------------


@contextlib.contextmanager
def job(timeout: float = 30, oracle: bool = False) -> Iterator[dist.ProcessGroup | None]:
    """Creates the default group with backend "smddp"; yields a gloo group of its ranks, or None."""
    dist.init_process_group("smddp", timeout=timedelta(seconds=timeout))
    try:
        yield dist.new_group(backend="gloo", timeout=timedelta(seconds=60)) if oracle else None
    finally:
        dist.destroy_process_group()


def limit(seconds: float, device: torch.device | str = "cpu") -> None:
    """Sets the timeout of later calls of the default group.

    For tests of timeouts. The group is created with a longer timeout, because that may take long on
    a busy machine.
    """
    backend = dist.group.WORLD._get_backend(torch.device(device))
    # The name is public from torch 2.15 on.
    set_timeout = getattr(backend, "set_timeout", None) or backend._set_default_timeout
    set_timeout(timedelta(seconds=seconds))


def folder() -> Path:
    """Returns a folder that all ranks of this run share; it is removed at its end."""
    return _folder


def arrive(where: str) -> None:
    """Tells await_ranks() that this rank has reached a place in its function."""
    (_folder / f"{os.environ['RANK']}.at.{where}").touch()


def await_ranks(where: str, count: int) -> None:
    """Waits until `count` ranks have reached a place; the timeout of the run is the limit.

    It uses files instead of the group or its store, so it works if those fail or are disconnected.
    """
    while len(list(_folder.glob(f"*.at.{where}"))) < count:
        time.sleep(0.01)


def listen(logger: str = "smddp.modelparallel") -> list[str]:
    """Returns a list to which everything that is logged from now on is appended."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(logger).addHandler(handler)
    return said


def whole_numbers(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Returns small integers, whose sums and products are exact in any order and dtype."""
    generator = torch.Generator().manual_seed(seed * 1000 + dist.get_rank())
    return torch.randint(1, 4, shape, generator=generator).to(dtype)
