"""With which releases of TensorFlow smddp is tested."""

from __future__ import annotations

import warnings

__all__ = ["check"]

_OLDEST, _NEWEST = (2, 16), (2, 21)


def check(version: str) -> None:
    """Warns if smddp is not tested with this version of TensorFlow."""
    release = tuple(int(part) for part in version.split(".")[:2])
    if not _OLDEST <= release <= _NEWEST:
        warnings.warn(
            f"smddp is tested with TensorFlow {_OLDEST[0]}.{_OLDEST[1]} to "
            f"{_NEWEST[0]}.{_NEWEST[1]}, and this is {version}: it may fail, or be slower",
            RuntimeWarning,
            stacklevel=2,
        )
