"""`python -m smddp.launch`: the command smddprun, where it is not installed."""

from __future__ import annotations

from smddp.launch.cli import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
