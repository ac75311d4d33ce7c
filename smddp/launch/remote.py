"""`smddprun --hostfile FILE --ssh`: one command for all hosts.

It runs `COMMAND HOST 'python -m smddp.launch.host'` for each host, as mpirun runs ssh, and tells it
by its standard input what to do (`host.py`).
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence

from smddp.launch.processes import GRACE, Child, Children, how_it_ended

__all__ = ["start_on_hosts", "variables_to_pass"]

_FAMILIES = ("SMDDP_", "NCCL_", "FI_")
_OTHERS = ("MASTER_ADDR", "MASTER_PORT")
_OF_ONE_HOST = ("SMDDP_NODE_ID",)
_LOST = 255  # of ssh: no connection


def variables_to_pass(asked: Sequence[str]) -> dict[str, str]:
    """Returns the variables that all hosts get.

    Args:
        asked: those of -x: NAME, or NAME=value.

    Raises:
        ValueError: one of them is not set here.
    """
    found = {
        name: value
        for name, value in os.environ.items()
        if (name.startswith(_FAMILIES) or name in _OTHERS) and name not in _OF_ONE_HOST
    }
    for word in asked:
        name, equals, value = word.partition("=")
        if not name or not (equals or name in os.environ):
            raise ValueError(
                f"-x {word}: there is no such variable here: set it, or give -x NAME=value"
            )
        found[name] = value if equals else os.environ[name]
    return found


def start_on_hosts(
    command: Sequence[str],
    hosts: Sequence[str],
    arguments: Sequence[Sequence[str]],
    variables: dict[str, str],
    is_elastic: bool,
    dry_run: bool = False,
) -> None:
    """Runs smddprun on all hosts until all have ended with 0.

    Args:
        command: takes a host and a command line, such as ssh.
        hosts: their names.
        arguments: for each host, those of smddprun there.
        variables: see variables_to_pass().
        is_elastic: the others go on without a host that is lost.
        dry_run: only print what would run.

    Raises:
        SystemExit: with the status of the first host that failed; with 128 and the number of a
            signal that has ended this process.
    """
    path = os.environ.get("PYTHONPATH")
    start = ["env", f"PYTHONPATH={path}"] if path else []
    line = shlex.join(["exec", *start, sys.executable, "-m", "smddp.launch.host"])
    jobs = [
        json.dumps({"folder": os.getcwd(), "variables": variables, "arguments": list(words)})
        for words in arguments
    ]
    if dry_run:
        for host, job in zip(hosts, jobs, strict=True):
            print(f"{shlex.join([*command, host, line])} <<< {shlex.quote(job)}")
        return
    children = Children()
    names: dict[Child, str] = {}
    for host, job in zip(hosts, jobs, strict=True):
        child = children.start([*command, host, line], dict(os.environ), "", subprocess.PIPE)
        names[child] = host
        _write(child, job + "\n")
    status = 0
    while children.running and not status:
        ended = children.wait()
        if children.signals:
            number = children.signals[0]
            _end(children)
            sys.stderr.write(f"smddprun: ended by {signal.Signals(number).name}\n")
            raise SystemExit(128 + number)
        for child in ended:
            code = child.process.returncode
            how = f"{names[child]}: smddprun there {how_it_ended(code)}"
            is_lost = child.is_smddprun and (code < 0 or code == _LOST)
            if is_elastic and is_lost and children.running:
                sys.stderr.write(f"smddprun: {how}: the other hosts go on\n")
            elif code and not status:
                sys.stderr.write(f"smddprun: {how}{_hint(code)}; the other hosts are ended\n")
                status = 128 - code if code < 0 else code
    _end(children)
    raise SystemExit(status)


def _hint(code: int) -> str:
    return " (ssh says so if it cannot connect)" if code == _LOST else ""


def _write(child: Child, text: str) -> None:
    assert child.process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # its end says why
        child.process.stdin.write(text.encode())


def _end(children: Children) -> None:
    """Ends all hosts: their launchers see the end of the input, and end their ranks."""
    children.signals.clear()
    for child in children.running:
        assert child.process.stdin is not None
        child.process.stdin.close()
    children.end(children.running, grace=GRACE + 10)  # theirs, and a while
