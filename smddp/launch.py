"""`python -m smddp.launch`: the command smddprun, where it is not installed."""

from __future__ import annotations

from smddp_launch import command_of, main

__all__ = ["command_of", "main"]

if __name__ == "__main__":
    main()
