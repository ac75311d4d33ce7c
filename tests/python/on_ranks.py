"""Tests whose whole body runs on ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import ranks


def on_ranks(layout: str, **options: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a test of a function: every rank of a layout calls it, and none may fail.

    Args:
        layout: see ranks.nodes_of(). "{pp}" in it stands for the argument `pp` of the test.
        options: of ranks.run_ranks().

    Returns:
        A decorator. Below it, the function is what ranks do; its parameters are those of the test.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(**given: Any) -> None:
            ranks.check_ranks(body, layout.format(**given), *given.values(), **options)

        # Ranks find the function by its name, which is the test's from now on. pytest must not.
        body.__name__ = f"on_a_rank_{body.__name__}"
        body.__globals__[body.__name__] = body
        return test

    return decorate
