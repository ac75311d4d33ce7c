"""The command `smddp`: what `python -m smddp.bench`, `smddp.plan` and `smddp.env` do."""

from __future__ import annotations

import sys

__all__ = ["main"]

_USAGE = """usage: smddp COMMAND ...

  bench      measure collectives, beside other backends and the hardware's limits
  bench ddp  measure training steps
  plan       show what a collective does, step by step
  env        print the settings in force
"""


def main(arguments: list[str] | None = None) -> int:
    """Runs a command; returns its exit status."""
    command, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    # Imported when used: a benchmark brings all of torch.
    if command == "bench":
        from smddp.bench.__main__ import main as bench

        return bench(rest)
    if command == "plan":
        from smddp.plan import main as plan

        return plan(rest)
    if command == "env":
        from smddp.env import main as env

        return env(rest)
    if command in ("-h", "--help"):
        print(_USAGE, end="")
        return 0
    print(f"smddp: {command!r} is no command; see `smddp --help`", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
