"""Gives the collectives that callbacks of futures make an order of their own.

All ranks must make the collectives of a group in the same order. A callback runs when its call has
ended, which each rank sees at another moment, on a thread of smddp or, if the call has ended
already, on the thread that adds the callback. So smddp has to know that a callback runs: then its
calls have an order that is apart from the script's (`csrc/process_group/call_order.h`).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["keep_order_of_callbacks"]

# The order of the call that completes a future, or a future before it; of smddp's calls only.
_orders: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


@functools.cache
def keep_order_of_callbacks(module: Any) -> None:
    """Replaces the functions of torch that make futures and add callbacks to them.

    They do what they did. Callbacks of futures of smddp run within `CallOrder.run`, which tells
    the process group of it. Futures of others are passed on unchanged.

    Args:
        module: the compiled module, `smddp.torch._C`.
    """
    from torch._C._distributed_c10d import Work

    future = torch._C.Future
    get_future, then, add, collect = (
        Work.get_future,
        future.then,
        future.add_done_callback,
        torch._C._collect_all,
    )

    @functools.wraps(get_future)
    def get_future_in_order(self: Any) -> Any:
        result = get_future(self)
        order = module.order_of(self)
        if order is not None:
            _orders[result] = order
        return result

    @functools.wraps(then)
    def then_in_order(self: Any, callback: Callable[[Any], Any]) -> Any:
        order = _orders.get(self)
        if order is None:
            return then(self, callback)
        result = then(self, functools.partial(order.run, callback))
        _orders[result] = order
        return result

    @functools.wraps(add)
    def add_in_order(self: Any, callback: Callable[[Any], Any]) -> None:
        order = _orders.get(self)
        add(self, callback if order is None else functools.partial(order.run, callback))

    @functools.wraps(collect)
    def collect_in_order(futures: list[Any]) -> Any:
        result = collect(futures)
        order = next((_orders[one] for one in futures if one in _orders), None)
        if order is not None:
            _orders[result] = order
        return result

    Work.get_future = get_future_in_order  # type: ignore[method-assign]
    future.then = then_in_order  # type: ignore[method-assign]
    future.add_done_callback = add_in_order  # type: ignore[method-assign]
    torch._C._collect_all = collect_in_order
