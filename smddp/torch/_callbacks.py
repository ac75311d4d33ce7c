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

from smddp._torch_internals import COLLECT_ALL, FUTURE_ADD, FUTURE_THEN, GET_FUTURE

__all__ = ["keep_order_of_callbacks"]

# The order of the call that completes a future, or a future before it; of smddp's calls only.
_orders: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def keep_order_of_callbacks(module: Any) -> None:
    """Replaces the functions of torch that make futures and add callbacks to them.

    They do what they did. Callbacks of futures of smddp run within `CallOrder.run`, which tells
    the process group of it. Futures of others are passed on unchanged.

    Args:
        module: the compiled module, `smddp.torch._C`.
    """

    def get_future(original: Any) -> Any:
        @functools.wraps(original)
        def get_future_in_order(self: Any) -> Any:
            result = original(self)
            order = module.order_of(self)
            if order is not None:
                _orders[result] = order
            return result

        return get_future_in_order

    GET_FUTURE.install(get_future)
    FUTURE_THEN.install(_then)
    FUTURE_ADD.install(_add)
    COLLECT_ALL.install(_collect)


def _then(original: Any) -> Any:
    @functools.wraps(original)
    def then_in_order(self: Any, callback: Callable[[Any], Any]) -> Any:
        order = _orders.get(self)
        if order is None:
            return original(self, callback)
        result = original(self, functools.partial(order.run, callback))
        _orders[result] = order
        return result

    return then_in_order


def _add(original: Any) -> Any:
    @functools.wraps(original)
    def add_in_order(self: Any, callback: Callable[[Any], Any]) -> None:
        order = _orders.get(self)
        original(self, callback if order is None else functools.partial(order.run, callback))

    return add_in_order


def _collect(original: Any) -> Any:
    @functools.wraps(original)
    def collect_in_order(futures: list[Any]) -> Any:
        result = original(futures)
        order = next((_orders[one] for one in futures if one in _orders), None)
        if order is not None:
            _orders[result] = order
        return result

    return collect_in_order
