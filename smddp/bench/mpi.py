"""The contenders Open MPI and MPICH, which run in processes of their own.

One process cannot load two implementations of MPI, and MPI must not spin while another contender is
measured. Therefore each MPI has as many processes as the benchmark has ranks (mpi_rank.py). They
sleep on a socket until rank 0 of the benchmark sends a command.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist

from smddp.bench.contender import PLACES, Unable
from smddp.bench.operations import Task

__all__ = ["MPIS", "MpiContender", "MpiError", "missing"]

# Seconds that one command may take, including the start of the ranks, before it counts as failed.
_TIMEOUT = 120.0
_WITHOUT_MPI_TYPE = ("half", "bfloat16", "bool")


@dataclasses.dataclass(frozen=True)
class _Mpi:
    title: str
    launchers: tuple[str, ...]  # programs that no other MPI has
    options: tuple[str, ...]
    library: str


MPIS = {
    "openmpi": _Mpi(
        "Open MPI",
        ("prterun", "mpirun.openmpi"),
        # Allow more ranks than cores, and do not bind ranks, as for the other contenders.
        ("--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"),
        "libmpi.so.40",
    ),
    "mpich": _Mpi("MPICH", ("mpiexec.hydra", "mpiexec.mpich"), (), "libmpi.so.12"),
}


def _launcher(mpi: _Mpi, prefix: Path) -> str | None:
    for name in mpi.launchers:
        inside = prefix / "bin" / name
        found = str(inside) if inside.exists() else shutil.which(name)
        if found:
            return found
    return None


def _python(prefix: Path) -> str:
    return sys.executable if prefix == Path(sys.prefix) else str(prefix / "bin" / "python")


def _environment(mpi: _Mpi, prefix: Path) -> dict[str, str]:
    # An mpirun that started this process has set variables that would confuse another MPI.
    foreign = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "HYDRA_", "MPI_LOCAL", "MPIR_")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "PRTE_ALLOW_RUN_AS_ROOT"):  # as every other contender
        environment |= {name: "1", f"{name}_CONFIRM": "1"}
    library = prefix / "lib" / mpi.library
    if library.exists():
        environment["MPI4PY_LIBMPI"] = str(library)
    return environment


@functools.cache
def missing(name: str, prefix: Path) -> str | None:
    """Returns the reason why an MPI cannot be measured; None if it can.

    Args:
        name: a key of MPIS.
        prefix: folder of a Python environment with mpi4py, numpy and perhaps the MPI itself.
    """
    mpi = MPIS[name]
    if _launcher(mpi, prefix) is None:
        install = f"`pip install {name} mpi4py numpy` into an environment of its own"
        return f"{mpi.title} is missing in {prefix}: {install}, and name that with --mpi"
    if shutil.which(_python(prefix)) is None:
        return f"--mpi {prefix}: there is no Python environment"
    test = ["-c", "import numpy; from mpi4py import MPI"]
    done = subprocess.run(
        [_python(prefix), *test], env=_environment(mpi, prefix), capture_output=True, text=True
    )
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"]
        return f"mpi4py does not work with {mpi.title}: {said[-1]}"
    return None


class MpiError(RuntimeError):
    """The processes of an MPI could not start, or have failed; the text says which and why."""


class MpiContender:
    """The processes of one MPI. Rank 0 of the benchmark starts them and sends them commands.

    Args:
        name: a key of MPIS.
        prefix: as for missing().

    Raises:
        MpiError: the processes could not start or failed; raised on all ranks.
    """

    error: float | None = None  # results are exact

    def __init__(self, name: str, prefix: Path) -> None:
        self._mpi = MPIS[name]
        self._launched: subprocess.Popen[bytes] | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  close() does
        self._ranks: dict[int, socket.socket] = {}
        self.library = str(self._on_rank_0(lambda: self._start(name, prefix)))

    def _on_rank_0(self, action: Any) -> Any:
        """Runs an action on rank 0; returns its result, or raises its error, on all ranks."""
        outcome: list[Any] = [None, None]
        if dist.get_rank() == 0:
            try:
                outcome = [action(), None]
            except (OSError, ValueError) as error:
                outcome = [None, f"{self._mpi.title}: {error}{self._last_line()}"]
        dist.broadcast_object_list(outcome, 0)
        if outcome[1] is not None:
            raise MpiError(outcome[1])
        return outcome[0]

    def _last_line(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return f" ({lines[-1]})" if lines else ""

    def _start(self, name: str, prefix: Path) -> str:
        launcher = _launcher(self._mpi, prefix)
        if launcher is None:
            raise OSError(missing(name, prefix))
        size = dist.get_world_size()
        with socket.create_server(("127.0.0.1", 0), backlog=size) as server:
            script = [str(Path(__file__).with_name("mpi_rank.py")), "127.0.0.1"]
            command = [launcher, *self._mpi.options, "-n", str(size), _python(prefix), *script]
            self._launched = subprocess.Popen(
                [*command, str(server.getsockname()[1])],
                env=_environment(self._mpi, prefix),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
            )
            return self._accept_ranks(server, size)

    def _accept_ranks(self, server: socket.socket, size: int) -> str:
        library = ""
        server.settimeout(1)
        deadline = _TIMEOUT
        while len(self._ranks) < size:
            try:
                connection, _ = server.accept()
            except TimeoutError:
                deadline -= 1
                assert self._launched is not None
                if deadline <= 0 or self._launched.poll() is not None:
                    raise OSError("its ranks did not start") from None
                continue
            connection.settimeout(_TIMEOUT)
            hello = json.loads(connection.makefile("r").readline())
            self._ranks[hello["rank"]] = connection
            library = hello["library"]
        self._answers = self._ranks[0].makefile("r")
        return library

    def _command(self, **command: Any) -> Any:
        def tell() -> Any:
            for connection in self._ranks.values():
                connection.sendall(json.dumps(command).encode() + b"\n")
            line = self._answers.readline()
            if not line:
                raise OSError("its ranks have ended")
            return json.loads(line)

        return self._on_rank_0(tell)

    def prepare(self, task: Task) -> list[str]:
        """See Contender."""
        if task.dtype in _WITHOUT_MPI_TYPE:
            raise Unable(f"MPI has no {task.dtype}")
        if task.operation.reduces and task.op == "avg":
            raise Unable("MPI has no avg")
        places = [place for place in PLACES if place != "in_place" or task.operation.in_place]
        self._task = task
        self._command(do="prepare", task=dataclasses.asdict(task), places=places)
        return places

    def time(self, place: str, calls: int) -> list[float]:
        """See Contender."""
        times: list[float] = self._command(do="time", place=place, calls=calls)
        return times

    def wrong(self, place: str, shift: int) -> int | None:
        """See Contender."""
        if self._task.collective == "barrier":
            return None
        return int(self._command(do="wrong", place=place, shift=shift))

    def close(self) -> None:
        """Ends the processes; kills them after 10 s."""
        for connection in self._ranks.values():
            # close() alone would not end the connection: the file of the answers keeps it open.
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        if self._launched is not None:
            try:
                self._launched.wait(10)
            except subprocess.TimeoutExpired:
                self._launched.kill()
                self._launched.wait()
        self._log.close()
