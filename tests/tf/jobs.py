"""Runs a function of a test module as the ranks of a job, without torch.

Importing TensorFlow takes seconds, a fork takes milliseconds. So a child process, the *nursery*,
imports it once, starts no thread, and forks the ranks of every job.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytest

ROOT = Path(__file__).resolve().parents[2]
BOTH_KERAS = pytest.mark.parametrize(
    "env",
    [{}, pytest.param({"TF_USE_LEGACY_KERAS": "1"}, marks=pytest.mark.slow)],
    ids=["keras3", "keras2"],
)


def error_of(call: Any, *args: Any) -> str:
    """Returns class and text of the error that a call raises."""
    try:
        try:
            call(*args)
        except RuntimeError:
            for _ in range(3):
                time.sleep(0.01)  # Python looks at signals
            raise
    except (Exception, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


class Job(NamedTuple):
    """What a nursery runs."""

    call: tuple[str, str, tuple[Any, ...]]  # module, function, arguments
    environments: list[dict[str, str]]  # of each rank
    timeout: float


def run(
    function: Callable[..., Any],
    layout: str,
    *arguments: Any,
    env: dict[str, str] | None = None,
    timeout: float = 300,
) -> list[Any]:
    """Returns what each rank returned; None for a rank that has ended without a result.

    Args:
        function: of a module beside this file.
        layout: number of ranks; "2x2" for 2 nodes of 2 ranks.
        arguments: of the function.
        env: variables of the ranks.
        timeout: seconds.
    """
    nodes, per_node = (int(part) for part in f"1x{layout}".split("x")[-2:])
    size, env = nodes * per_node, env or {}
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environments = [
        {
            **{"RANK": str(rank), "WORLD_SIZE": str(size)},
            **{"LOCAL_RANK": str(rank % per_node), "LOCAL_WORLD_SIZE": str(per_node)},
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
            **({"SMDDP_NODE_ID": str(rank // per_node)} if nodes > 1 else {}),
            **env,
        }
        for rank in range(size)
    ]
    nursery = _nursery(env.get("TF_USE_LEGACY_KERAS", ""))
    assert nursery.stdin is not None
    assert nursery.stdout is not None
    call = function.__module__, function.__name__, arguments
    pickle.dump(Job(call, environments, timeout), nursery.stdin)
    nursery.stdin.flush()
    outcomes = pickle.load(nursery.stdout)
    failed = [
        f"rank {rank}, status {status}:\n{said[-6000:]}"
        for rank, (status, said, _) in enumerate(outcomes)
        if status not in (0, -signal.SIGKILL)
    ]
    assert not failed, "\n".join(failed)
    return [pickle.loads(result) if result else None for _, _, result in outcomes]


@functools.cache
def _nursery(legacy: str) -> subprocess.Popen[bytes]:
    """Starts a nursery; TensorFlow chooses the version of Keras when it is imported."""
    once = {"TF_CPP_MIN_LOG_LEVEL": "2", "TF_NUM_INTRAOP_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    once |= {"TF_USE_LEGACY_KERAS": legacy, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'tf'}"}
    nursery = subprocess.Popen(
        [sys.executable, "-c", "import jobs; jobs.serve()"],
        env={**os.environ, **once},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    atexit.register(nursery.communicate)
    return nursery


def serve() -> None:
    """Runs jobs until the standard input ends."""
    importlib.import_module("smdistributed.dataparallel.tensorflow")
    importlib.import_module("smdistributed.modelparallel.tensorflow")
    # Otherwise each collection of garbage in a rank would write to these, and copy their pages.
    gc.freeze()
    while True:
        try:
            job = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        # Ranks would remove a TemporaryDirectory when they end.
        folder, pids = Path(tempfile.mkdtemp()), []
        for rank in range(len(job.environments)):
            pids.append(os.fork())
            if pids[-1] == 0:
                _be_rank(job, rank, folder)
        outcomes = _outcomes(pids, job.timeout, folder)
        shutil.rmtree(folder)
        pickle.dump(outcomes, sys.stdout.buffer)
        sys.stdout.flush()


def _be_rank(job: Job, rank: int, folder: Path) -> NoReturn:
    log = os.open(folder / f"log{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(job.environments[rank])
    module, name, arguments = job.call
    status = 1
    try:
        result = getattr(importlib.import_module(module), name)(*arguments)
        assert "torch" not in sys.modules
        (folder / f"result{rank}").write_bytes(pickle.dumps(result))
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _outcomes(pids: list[int], timeout: float, folder: Path) -> list[tuple[int, str, bytes]]:
    """Waits for ranks; returns exit status, output and pickled result of each."""
    deadline, statuses = time.monotonic() + timeout, dict.fromkeys(pids)
    while None in statuses.values():
        for pid in [pid for pid, status in statuses.items() if status is None]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                statuses[pid] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                os.kill(pid, signal.SIGABRT)
        time.sleep(0.01)
    found = []
    for rank, status in enumerate(statuses.values()):
        made = folder / f"result{rank}"
        said = (folder / f"log{rank}").read_text()
        found.append((status, said, made.read_bytes() if made.exists() else b""))
    return found
