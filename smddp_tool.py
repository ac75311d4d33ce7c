"""The command `smddp`: says in one sentence why smddp cannot be used with the installed torch.

This module is not part of the package smddp, whose import raises then.
"""

from __future__ import annotations

import sys
from typing import NoReturn

__all__ = ["command"]


def command() -> NoReturn:
    """Runs `smddp`, as the shell does.

    Raises:
        SystemExit: the command has ended, or smddp cannot be imported.
    """
    try:
        from smddp.cli import command as run
    except ImportError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:  # the import takes a second
        sys.excepthook = lambda *_: None
        raise
    run()


if __name__ == "__main__":
    command()
