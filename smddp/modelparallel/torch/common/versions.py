"""The versions of classes of modules, which torch keeps beside the entries of a state dict."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

from torch import nn

__all__ = ["versions_in", "versions_of", "with_versions"]


def with_versions(entries: dict[str, Any], versions: Any) -> dict[str, Any]:
    """Returns entries with the versions of the classes that they are of, as torch keeps them.

    Modules may load entries of an older version of their class in another way.

    Args:
        entries: a state dict.
        versions: what `versions_of` returns; None for entries that come without.
    """
    if versions is None:
        return entries
    found = collections.OrderedDict(entries)
    found._metadata = versions  # type: ignore[attr-defined]
    return found


def versions_of(entries: Mapping[str, Any]) -> Any:
    """Returns the versions that a state dict has; None if it has none."""
    return getattr(entries, "_metadata", None)


def versions_in(root: nn.Module) -> Any:
    """Returns the versions of the classes of all modules in a model."""
    named = root.named_modules(remove_duplicate=False)
    return collections.OrderedDict((name, {"version": one._version}) for name, one in named)
