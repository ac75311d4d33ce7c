"""Finds variables that look like settings of smddp, and are none."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

__all__ = ["misspelt"]

# Read by the build, not by the library.
_BUILD_ONLY = ("SMDDP_CMAKE_ARGS", "SMDDP_TORCH_FOLDERS")

# smddprun --elastic tells its ranks by them what they are.
_OF_SMDDPRUN = ("SMDDP_ELASTIC", "SMDDP_ELASTIC_SPARE")

# Sizes of buffers that SageMaker's library has. Job scripts set them; here they have no effect.
_OF_THE_ORIGINAL = ("SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES", "SMDDP_AG_SORT_BUFFER_SIZE_BYTES")


def misspelt(environ: Mapping[str, str], known: Iterable[str]) -> list[str]:
    """Returns one sentence for each variable that begins with SMDDP_ but means nothing.

    Variables of SageMaker's library mean nothing here either, but they are not misspelt.

    Args:
        environ: the variables and their values.
        known: the names of all settings.
    """
    names = [*known, *_BUILD_ONLY, *_OF_SMDDPRUN, *_OF_THE_ORIGINAL]
    sentences = []
    for name in sorted(environ):
        if not name.startswith("SMDDP_") or name in names:
            continue
        nearest = difflib.get_close_matches(name, names, n=1)
        advice = f"did you mean {nearest[0]}?" if nearest else "see `smddp env`."
        sentences.append(f"{name} is not a setting of smddp: {advice}")
    return sentences
