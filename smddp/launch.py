"""`smddprun`: lets mpirun or srun start a script that calls `torch.distributed`.

    mpirun -n 8 smddprun python train.py

It sets the variables that `torch.distributed` reads from those that mpirun or srun set. Then it
replaces itself by the command that follows on its command line. `smddpmprun` is the same program.
Both accept and ignore -i and --allow-bypass, options of SageMaker's launcher about the instance
type.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from smddp._environment import complete_from_launcher, complete_rendezvous

__all__ = ["command_of", "main"]

_WITH_VALUE = ("-i", "--instance-type")
_FLAGS = ("--allow-bypass",)


def command_of(arguments: Sequence[str]) -> list[str]:
    """Returns the command line without the launcher's own options, which come first."""
    rest = list(arguments)
    while rest and (rest[0] in _WITH_VALUE or rest[0] in _FLAGS):
        del rest[: 2 if rest[0] in _WITH_VALUE else 1]
    return rest


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Sets the environment, then replaces this process by the command.

    Raises:
        SystemExit: there is no command, or it cannot be run, or the ranks cannot be known.
    """
    command = command_of(sys.argv[1:] if arguments is None else arguments)
    if not command:
        raise SystemExit("smddprun: name the command to run: mpirun -n 8 smddprun python train.py")
    complete_from_launcher()
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise SystemExit(
            "smddprun: this process has no rank: start it by mpirun or srun, or use torchrun"
        )
    if not complete_rendezvous():
        raise SystemExit(
            "smddprun: the job has several hosts, and nothing says where rank 0 is: "
            "set MASTER_ADDR, for instance by mpirun -x MASTER_ADDR=host"
        )
    try:
        os.execvp(command[0], command)
    except OSError as error:
        raise SystemExit(f"smddprun: {command[0]}: {error.strerror}") from None


if __name__ == "__main__":
    main()
