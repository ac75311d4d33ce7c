"""The versions of classes of modules, which torch keeps beside the entries of a state dict."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

from torch import nn

from smddp._torch_internals import class_version, set_versions_in_state_dict, versions_in_state_dict

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
    set_versions_in_state_dict(found, versions)
    return found


def versions_of(entries: Mapping[str, Any]) -> Any:
    """Returns the versions that a state dict has; None if it has none."""
    return versions_in_state_dict(entries)


def versions_in(root: nn.Module) -> Any:
    """Returns the versions of the classes of all modules in a model."""
    named = root.named_modules(remove_duplicate=False)
    return collections.OrderedDict((name, {"version": class_version(one)}) for name, one in named)
