"""What a call does with a module: runs it, in one of several ways, or reads a part of it."""

from __future__ import annotations

import enum
from typing import NamedTuple

__all__ = [
    *("CALL", "DIFFERENTIATE", "FORWARD", "HOOKED", "LAYERS", "READS", "RECOMPUTED"),
    *("Method", "Use"),
]


class Use(enum.IntEnum):
    """The kinds of calls."""

    CALL = 0  # runs the module
    FORWARD = 1  # runs it, too; the code has called its `forward` by name
    RECOMPUTED = 2  # with activation checkpointing; takes ((args, kwargs), same random numbers?)
    LAYERS = 3  # some layers of an nn.Sequential, likewise; see `Routing.call_layers`
    DIFFERENTIATE = 4  # the backward pass of a segment that has run; see `Differentiation`
    PARAMETER = 5  # reads a parameter
    BUFFER = 6  # reads a buffer
    # A buffer that was taken from its module before a later call of a module on another rank. If
    # code has ever put another tensor in the buffer's place, the owner raises.
    EARLIER_BUFFER = 7
    SAME_BUFFER = 8  # as EARLIER_BUFFER, but the owner answers None in place of raising


class Method(NamedTuple):
    """What a call does. It is part of messages, and the same on all ranks that make the call.

    Attributes:
        use: its kind.
        name: of the parameter or buffer that it reads, in its module; else empty.
    """

    use: Use
    name: str = ""


CALL, FORWARD = Method(Use.CALL), Method(Use.FORWARD)
RECOMPUTED, LAYERS = Method(Use.RECOMPUTED), Method(Use.LAYERS)
DIFFERENTIATE = Method(Use.DIFFERENTIATE)
READS = frozenset({Use.PARAMETER, Use.BUFFER, Use.EARLIER_BUFFER, Use.SAME_BUFFER})
# Calls for which forward hooks run.
HOOKED = frozenset({Use.CALL, Use.RECOMPUTED})
