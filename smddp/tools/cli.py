"""The command `smddp`, each of whose commands is in a module of its own."""

from __future__ import annotations

import sys
from typing import NoReturn

from smddp._version import __version__
from smddp.tools._command import run

__all__ = ["command", "main"]

_USAGE = """usage: smddp COMMAND ...

  bench      measure collectives, beside other backends and the hardware's limits
  bench ddp  measure training steps
  plan       show what a collective does, step by step
  env        print the settings in force
  topo       print what smddp sees of this host, or, under a launcher, of all hosts of the job
  doctor     find out what is wrong with this host, or, under a launcher, between hosts
  status     show what ranks on this host are doing, without stopping them
  merge      make one file of a model that smp has saved in parts

  --version  print the version of smddp, and the release of torch that it runs with
"""


def command() -> NoReturn:
    """Runs `smddp`, as the shell does."""
    run(main)


def main(arguments: list[str] | None = None) -> int:
    """Runs a command; returns its exit status."""
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    # Imported when used: the benchmark imports torch, and others need not wait for that.
    if name == "bench":
        from smddp.bench.__main__ import main as bench

        return bench(rest)
    if name == "plan":
        from smddp.tools.plan import main as plan

        return plan(rest)
    if name == "env":
        from smddp.tools.env import main as env

        return env(rest)
    if name == "doctor":
        from smddp.tools.doctor import main as doctor

        return doctor(rest)
    if name == "status":
        from smddp.tools.status import main as status

        return status(rest)
    if name == "topo":
        from smddp.tools.topology import main as topo

        return topo(rest)
    if name == "merge":
        from smddp.tools.merge import main as merge

        return merge(rest)
    if name == "--version":
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"smddp {__version__}, torch {version('torch')}")
        except PackageNotFoundError:
            print(f"smddp {__version__}, no torch")
        return 0
    if name in ("-h", "--help"):
        print(_USAGE, end="")
        return 0
    print(f"smddp: {name!r} is not a command; see `smddp --help`", file=sys.stderr)
    return 2


if __name__ == "__main__":
    command()
