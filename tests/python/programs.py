"""Programs in Python that tests run: forked from the nursery of ranks.py, not new interpreters.

A new interpreter needs two seconds of processor time to import torch, and a job under torchrun has
several. A program here is a process of its own with the arguments, variables, streams and signals
that it would have; so is each Python program that it starts, a child of the one that starts it. It
differs in what is imported when it begins: torch and smddp, and what the process that starts it
has imported. It ends as a rank does, without taking the interpreter down. Tests of imports, and of
the end, use interpreters.py.
"""

from __future__ import annotations

import gc
import importlib
import io
import os
import runpy
import signal
import subprocess
import sys
import threading
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import ranks

_ROOT = str(ranks.ROOT)
_INSTALLED = [path for path in sys.path if path.startswith((sys.prefix, sys.base_prefix))]


def environment(**variables: str) -> dict[str, str]:
    """Returns the variables of a program: those of this process, and `variables`."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": _ROOT, **variables}


def run(
    *arguments: str,
    timeout: float = 110,
    modules: Sequence[str] = (),
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Does what `python <arguments>` does, in the current folder, and waits for its end.

    Args:
        arguments: the command line after `python`.
        timeout: seconds after which the program is killed.
        modules: are imported once, for all programs and ranks that come later.
        variables: see environment().
    """
    return run_together([arguments], [environment(**variables)], timeout, modules)[0]


def run_together(
    commands: Sequence[Sequence[str]],
    environments: Sequence[dict[str, str]],
    timeout: float = 110,
    modules: Sequence[str] = (),
    network: Any = None,
) -> list[subprocess.CompletedProcess[str]]:
    """Runs programs at the same time. With a network of hosts.py each runs on a host of its own."""
    layout = "+".join("1" for _ in commands)
    programs = list(zip(commands, environments, strict=True))
    outcomes = ranks.run_ranks(
        _be_one_of, layout, programs, os.getcwd(), timeout=timeout, network=network, modules=modules
    )
    return [
        subprocess.CompletedProcess(command, outcome.status, outcome.stdout, outcome.stderr)
        for command, outcome in zip(commands, outcomes, strict=True)
    ]


def _be_one_of(programs: Sequence[tuple[Sequence[str], dict[str, str]]], folder: str) -> NoReturn:
    arguments, variables = programs[int(os.environ["RANK"])]
    os.chdir(folder)
    become(arguments, variables)


def in_a_child(action: Callable[[], str]) -> str:
    """Returns what an action returns in a child of this process, or the text of its error."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            text = action()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    text = os.read(reader, 4096).decode()
    os.waitpid(child, 0)
    os.close(reader)
    return text


def become(arguments: Sequence[str], variables: dict[str, str]) -> NoReturn:
    """Does in this forked process what `python <arguments>` does in a new one, and ends it."""
    # What is left of the process that forked this one stays as it is: its destructors could wait
    # for threads that are not here.
    gc.freeze()
    ranks.forget_exit_handlers()
    os.environ.clear()
    os.environ.update(variables)
    for each in signal.valid_signals():
        if callable(signal.getsignal(each)):
            signal.signal(each, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False))
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), write_through=True)
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), write_through=True)
    sys.excepthook = sys.__excepthook__
    subprocess.Popen.__init__ = _fork_instead  # type: ignore[method-assign]
    os.execvp = _become_instead  # type: ignore[assignment]
    code = 0
    try:
        _interpret(list(arguments))
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    ranks.end(code)


def _interpret(arguments: list[str]) -> None:
    for option in filter(None, os.environ.get("PYTHONWARNINGS", "").split(",")):
        warnings._setoption(option)  # type: ignore[attr-defined]
    if arguments[0] == "-u":
        del arguments[0]
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [os.getcwd(), *filter(None, paths), *_INSTALLED]
    importlib.invalidate_caches()
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.modules.pop(arguments[1], None)  # runpy warns of a module that is imported already
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(arguments[1], vars(sys.modules["__main__"]))
    else:
        sys.argv = arguments
        sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
        runpy.run_path(arguments[0], run_name="__main__")


_popen = subprocess.Popen.__init__


def _fork_instead(
    self: subprocess.Popen[Any],
    args: Any,
    *rest: Any,
    env: dict[str, str] | None = None,
    preexec_fn: Callable[[], object] | None = None,
    pass_fds: Sequence[int] = (),
    **options: Any,
) -> None:
    """Forks a Python program: the function that runs before exec() becomes it, and stays."""

    def program() -> None:
        if preexec_fn is not None:
            preexec_fn()
        # Among them is the pipe at whose end the parent waits for exec().
        first = 3
        for kept in sorted(pass_fds):
            os.closerange(first, kept)
            first = kept + 1
        os.closerange(first, os.sysconf("SC_OPEN_MAX"))
        become(args[1:], dict(os.environ) if env is None else env)

    # A compiled module that has been used keeps the settings of this process.
    is_python = isinstance(args, (list, tuple)) and args[0] == sys.executable
    forked = is_python and "smddp.torch._C" not in sys.modules
    _popen(
        self, args, *rest, env=env, preexec_fn=program if forked else preexec_fn,
        pass_fds=pass_fds, **options,
    )  # fmt: skip


_execvp = os.execvp


def _become_instead(file: str, args: Sequence[str]) -> None:
    if file == sys.executable:
        become(args[1:], dict(os.environ))
    _execvp(file, args)
