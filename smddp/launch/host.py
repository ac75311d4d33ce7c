"""smddprun on a host, for `smddprun --ssh` on another one: `python -m smddp.launch.host`.

What to do comes by the standard input, as a line of JSON: no shell quotes it, and no list of
processes shows it. The end of this input ends all that runs here.
"""

from __future__ import annotations

import json
import os
import signal
from typing import NoReturn

from smddp.launch.cli import main as smddprun
from smddp.launch.processes import die_with_parent

__all__ = ["main"]


def main() -> NoReturn:
    """Runs smddprun on a host, for the one that has started it.

    Raises:
        SystemExit: always; see smddp.launch.cli.main().
    """
    # From the file itself, so that nothing of what follows is in a buffer.
    line = b""
    while not line.endswith(b"\n"):
        piece = os.read(0, 1)
        if not piece:
            raise SystemExit(
                "smddprun: the command of --ssh does not pass on its standard input, from which "
                "the host is told what to do (with ssh: leave out -n)"
            )
        line += piece
    job = json.loads(line)
    try:
        os.chdir(job["folder"])
    except OSError as error:
        raise SystemExit(f"smddprun: {job['folder']}: {error.strerror}") from None
    os.environ.update(job["variables"])
    launcher = os.getpid()
    if os.fork() == 0:
        die_with_parent(launcher)
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (1, 2):  # which ssh would wait for
            os.dup2(null, stream)
        while os.read(0, 4096):
            pass
        os.kill(launcher, signal.SIGTERM)
        os._exit(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    smddprun(job["arguments"])
    raise SystemExit(0)


if __name__ == "__main__":
    main()
