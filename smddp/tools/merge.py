"""The command `smddp merge`: makes one file of a checkpoint in parts, without a job."""

from __future__ import annotations

import argparse
import pickle
import sys
from pathlib import Path

from smddp.modelparallel.core.errors import SMPUsageError

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Merges a checkpoint; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="smddp merge",
        description="Makes one file of the model in a checkpoint that smp.save_checkpoint has "
        "written in parts (partial=True). It needs memory for the whole model, but no job.",
    )
    parser.add_argument("path", type=Path, help="the folder that save_checkpoint was given")
    parser.add_argument(
        "file",
        type=Path,
        help="to write, in the format of safetensors if its name ends so, else of torch.save",
    )
    parser.add_argument("--tag", help="of the checkpoint; default: the newest one")
    options = parser.parse_args(arguments)
    from smddp.modelparallel.torch.checkpoint.checkpoint import full_state_dict, write_whole

    try:
        entries = full_state_dict(str(options.path), options.tag)
        options.file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(options.file, entries)
    except (OSError, ValueError, SMPUsageError, pickle.UnpicklingError) as error:
        print(f"smddp merge: {error}", file=sys.stderr)
        return 1
    print(f"# wrote {options.file}: {len(entries)} entries")
    return 0
