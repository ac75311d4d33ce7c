"""Frees what a backward pass that has failed leaves in autograd's engine.

The engine keeps the nodes that were ready to run, with all tensors of their graph, in a queue of
the thread, until a later pass of the same thread takes them out. It works on the nodes made last
first, and skips those of passes that have failed. So a pass over a node that counts as made before
all others empties the queue.
"""

from __future__ import annotations

import atexit
import functools

import torch

from smddp._torch_internals import set_sequence_number

__all__ = ["forget_failed_pass", "forget_failed_passes_at_exit"]


def forget_failed_pass() -> None:
    """Frees what is left of a backward pass that has failed on the calling thread.

    No backward pass may be under way on that thread.
    """
    with torch.enable_grad():
        leaf = torch.zeros((), device="cpu", requires_grad=True)
        first = leaf * 1
    assert first.grad_fn is not None
    set_sequence_number(first.grad_fn)(0)
    torch.autograd.grad(first, leaf)


@functools.cache
def forget_failed_passes_at_exit() -> None:
    """Frees it at exit for the calling thread, which has to be the main one.

    The main thread ends after the interpreter, and then the process would crash, because what is
    left refers to hooks in Python.
    """
    atexit.register(forget_failed_pass)
