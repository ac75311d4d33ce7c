"""Numbers as a short text."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["plural", "spans"]


def plural(count: int, name: str) -> str:
    """Returns a number of things: "1 core", "2 cores"."""
    return f"{count} {name}{'' if count == 1 else 's'}"


def spans(numbers: Iterable[int]) -> list[str]:
    """Returns what follows one another as one text: 0, 1, 2, 5 as "0-2" and "5"."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][-1] == number - 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ["-".join(map(str, part)) for part in parts]
