"""smddp for programs without torch: collectives and messages on numpy arrays.

    import smddp.numpy as smddp

    world = smddp.init()                       # under smddprun, torchrun, mpirun or srun
    total = world.allreduce(numpy.ones(5))     # a new array, the same on all ranks
    world.allreduce(x, out=x)                  # in place
    work = world.allreduce(x, out=x, wait=False)
    work.wait()

It calls the C interface of the engine (smddp/include/smddp.h), and does not import torch. An array
may be anything with `__dlpack__` or `__array__` in memory of the host; what has to be written to
must be a C-contiguous array that can be written to. Types: float16, float32, float64, complex64,
complex128, integers of 8 to 64 bits, bool, and bfloat16 of ml_dtypes.

All ranks of a group make the same calls in the same order. Errors name the rank at fault.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import enum
import itertools
import math
import numbers
import operator
import os
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from smddp.launch import environment, rendezvous

__all__ = [
    "AbortedError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "Error",
    "Group",
    "InternalError",
    "Op",
    "PeerLostError",
    "ResourceError",
    "TransportError",
    "Work",
    "empty",
    "init",
]

_PACKAGE = Path(__file__).parent


class Error(RuntimeError):
    """Something has ended the operations of a group; it cannot be used any more."""


class CollectiveMismatchError(Error):
    """The ranks do not make the same call."""


class PeerLostError(Error):
    """A rank has died, left or become unreachable."""


class CollectiveTimeoutError(Error):
    """A rank did not come in time."""


class AbortedError(Error):
    """The group was left or aborted meanwhile."""


class TransportError(Error):
    """The network or shared memory failed."""


class ResourceError(Error):
    """No memory, descriptors or threads are left."""


class InternalError(Error):
    """A bug in smddp."""


class Op(enum.IntEnum):
    """How a reduction combines elements. `SCALED_SUM` is the sum of factor * element."""

    SUM = 0
    AVERAGE = 1
    PRODUCT = 2
    MIN = 3
    MAX = 4
    BAND = 5
    BOR = 6
    BXOR = 7
    SCALED_SUM = 8


_OK, _USAGE, _PENDING = 0, 1, 10
_ERRORS: dict[int, type[Exception]] = {
    _USAGE: ValueError,
    2: CollectiveMismatchError,
    3: PeerLostError,
    4: CollectiveTimeoutError,
    5: AbortedError,
    6: TransportError,
    7: ResourceError,
    8: InternalError,
}
# In the order of smddp_type.
_TYPES = [
    *("float32", "float64", "float16", "bfloat16", "complex64", "complex128"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool"),
]
_ALLREDUCE, _BROADCAST, _ALLGATHER, _REDUCE_SCATTER, _BARRIER = range(5)
_REDUCE, _GATHER, _SCATTER, _ALLTOALL = range(5, 9)
# Seconds between looks at Ctrl-C. Far less than 50 ms, after which a wait calls `_is_interrupted`:
# on the main thread Python would raise KeyboardInterrupt in it, where nobody sees it.
_SLICE = 0.02

_Release = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_Check = ctypes.CFUNCTYPE(ctypes.c_int)


class _Arguments(ctypes.Structure):
    _fields_ = [
        ("collective", ctypes.c_int),
        ("input", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("type", ctypes.c_int),
        ("op", ctypes.c_int),
        ("factor", ctypes.c_double),
        ("root", ctypes.c_int),
        ("timeout", ctypes.c_double),
        ("release", _Release),
        ("held", ctypes.c_void_p),
    ]


class _Message(ctypes.Structure):
    _fields_ = [
        ("memory", ctypes.c_void_p),
        ("bytes", ctypes.c_int64),
        ("peer", ctypes.c_int),
        ("tag", ctypes.c_int),
        ("timeout", ctypes.c_double),
        ("release", _Release),
        ("held", ctypes.c_void_p),
    ]


# Arrays that the engine uses, by number. It releases them on its own threads.
_held: dict[int, Any] = {}
_numbers = itertools.count(1)


def _drop(number: int) -> None:
    _held.pop(number, None)


_release = _Release(_drop)


class _Interruption(threading.local):
    """What ends the call that this thread is in, if another thread has set it."""

    event: threading.Event | None = None


_interruption = _Interruption()


def _is_interrupted() -> int:
    event = _interruption.event
    return event is not None and event.is_set()


_check = _Check(_is_interrupted)


class _Library:
    """The functions of libsmddp.so, which is loaded at the first use."""

    def __init__(self) -> None:
        self._library: Any = None
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        with self._lock:
            if self._library is None:
                self._library = _load()
        function = getattr(self._library, f"smddp_{name}")
        setattr(self, name, function)
        return function


def _load() -> Any:
    path = _PACKAGE / "lib" / "libsmddp.so"
    if not path.exists():
        raise ImportError(
            f"{_PACKAGE.resolve()} has no compiled part, as in sources that were not built: run "
            "Python in another folder to use an installed smddp, or build these with `make setup`."
        )
    library = ctypes.CDLL(str(path))
    pointer, status = ctypes.c_void_p, ctypes.c_int
    out = ctypes.POINTER(pointer)
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "error": (ctypes.c_char_p, []),
        "join": (status, [ctypes.c_char_p, *[ctypes.c_int] * 3, ctypes.c_double, out]),
        "split": (status, [pointer, ctypes.POINTER(ctypes.c_int), ctypes.c_int, out]),
        "leave": (status, [pointer]),
        "abort": (status, [pointer, ctypes.c_char_p]),
        "begin": (status, [pointer, ctypes.POINTER(_Arguments), out]),
        "send": (status, [pointer, ctypes.POINTER(_Message), out]),
        "receive": (status, [pointer, ctypes.POINTER(_Message), out]),
        "wait": (status, [pointer, ctypes.c_double]),
        "source": (ctypes.c_int, [pointer]),
        "free": (None, [pointer]),
        "allocate": (pointer, [ctypes.c_size_t]),
        "deallocate": (None, [pointer]),
        "set_interrupt_check": (None, [_Check]),
        "end": (None, []),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, f"smddp_{name}")
        function.restype, function.argtypes = result, arguments
    library.smddp_set_interrupt_check(_check)
    atexit.register(library.smddp_end)
    return library


_library = _Library()


def _raise(status: int) -> None:
    if status != _OK:
        raise _ERRORS.get(status, Error)(_library.error().decode())


def _interruptible(call: Callable[[], None]) -> None:
    """Runs a call that waits, so that Ctrl-C ends it."""
    if threading.current_thread() is not threading.main_thread():
        call()
        return
    failure: list[BaseException] = []
    # Not Thread.join(): a thread whose join() was interrupted counts as ended (Python 3.11).
    interrupted, ended = threading.Event(), threading.Event()

    def run() -> None:
        _interruption.event = interrupted
        try:
            call()
        except BaseException as error:
            failure.append(error)
        finally:
            ended.set()

    try:
        threading.Thread(target=run, daemon=True).start()
        while not ended.wait(_SLICE):
            pass
    except BaseException:
        interrupted.set()
        while not ended.wait(_SLICE):
            pass
        raise
    if failure:
        raise failure[0]


class Work:
    """An operation that was begun.

    Attributes:
        result: the array that it writes to; None if it writes to none on this rank. It has its
            value when the operation has ended.
    """

    def __init__(self, group: Group, operation: ctypes.c_void_p, result: Any) -> None:
        self._group, self._operation, self.result = group, operation, result

    def wait(self) -> Any:
        """Waits until the operation has ended, and returns `result`.

        Raises:
            Error: what has ended the operation; one of its subclasses.
        """
        try:
            status = self._status(math.inf)
        except BaseException:
            # The other ranks wait for this one.
            with contextlib.suppress(Error, ValueError):
                self._group.abort("a wait was interrupted")
            raise
        _raise(status)
        return self.result

    def is_completed(self, seconds: float = 0.0) -> bool:
        """Returns whether the operation has ended, well or not; waits at most so many seconds."""
        if not 0 <= _number(seconds, "a time to wait") < math.inf:
            raise ValueError(f"smddp: a wait of {seconds} seconds; it must be 0 or more, and end")
        return self._status(float(seconds)) != _PENDING

    def _status(self, seconds: float) -> int:
        """Waits at most so many seconds, and lets Python's signal handlers run meanwhile."""
        end = time.monotonic() + seconds
        while True:
            left = end - time.monotonic()
            status = int(_library.wait(self._operation, min(max(left, 0.0), _SLICE)))
            if status != _PENDING or left <= 0:
                return status

    def source(self) -> int:
        """Returns the rank from which a message was received."""
        return int(_library.source(self._operation))

    def __del__(self) -> None:
        _library.free(self._operation)


class Group:
    """Some ranks of a job.

    Every method but `send` and `receive` is called by all ranks of the group, in the same order.
    With `wait=False` a method returns a `Work` at once. `timeout` is in seconds; None means that of
    `init`. A call that makes no sense raises ValueError or TypeError, before anything is started.

    Attributes:
        rank: of this process in the group.
        size: number of ranks.
    """

    def __init__(self, handle: ctypes.c_void_p, rank: int, size: int) -> None:
        self._handle: ctypes.c_void_p | None = handle
        self.rank, self.size = rank, size

    def allreduce(
        self,
        array: Any,
        *,
        op: Op = Op.SUM,
        factor: float = 1.0,
        out: Any = None,
        wait: bool = True,
        timeout: float | None = None,
    ) -> Any:
        """Combines the arrays of all ranks, element by element.

        Args:
            array: of one shape and type on all ranks.
            op: how elements are combined.
            factor: of `Op.SCALED_SUM`.
            out: where the result goes; it may be `array`. None: a new array.
            wait: return when it has ended.
            timeout: seconds.
        """
        given = _readable(array)
        result = np.empty_like(given, order="C") if out is None else _writable(out, given)
        how = {"op": _op(op), "factor": factor}
        return self._run(_ALLREDUCE, given, result, given, wait, timeout, **how)

    def reduce(
        self,
        array: Any,
        root: int,
        *,
        op: Op = Op.SUM,
        factor: float = 1.0,
        out: Any = None,
        wait: bool = True,
        timeout: float | None = None,
    ) -> Any:
        """Does the same, but only rank `root` gets the result; others get None."""
        given = _readable(array)
        result = None
        if self.rank == root:
            result = np.empty_like(given, order="C") if out is None else _writable(out, given)
        how = {"op": _op(op), "factor": factor, "root": root}
        return self._run(_REDUCE, given, result, given, wait, timeout, **how)

    def broadcast(
        self, array: Any, root: int, *, wait: bool = True, timeout: float | None = None
    ) -> Any:
        """Sends rank `root`'s array to all; `array` is overwritten on other ranks, and returned.

        It must be C-contiguous, and writable on other ranks than `root`.
        """
        # As far as the ranks have equal arrays, the root refuses what the others refuse, lest it
        # begins alone.
        result = _writable(array, only_read=self.rank == root)
        return self._run(_BROADCAST, None, result, result, wait, timeout, root=root)

    def allgather(
        self, array: Any, *, out: Any = None, wait: bool = True, timeout: float | None = None
    ) -> Any:
        """Returns the arrays of all ranks, [ranks, ...]."""
        given = _readable(array)
        shape = (self.size, *given.shape)
        result = np.empty(shape, given.dtype) if out is None else _writable(out, given, shape)
        return self._run(_ALLGATHER, given, result, given, wait, timeout)

    def reduce_scatter(
        self,
        array: Any,
        *,
        op: Op = Op.SUM,
        factor: float = 1.0,
        out: Any = None,
        wait: bool = True,
        timeout: float | None = None,
    ) -> Any:
        """Combines arrays [ranks, ...] of all ranks; rank r gets part r, of the shape."""
        given = self._parts(array)
        block = given[0]
        result = np.empty(block.shape, given.dtype) if out is None else _writable(out, block)
        how = {"op": _op(op), "factor": factor}
        return self._run(_REDUCE_SCATTER, given, result, block, wait, timeout, **how)

    def gather(
        self,
        array: Any,
        root: int,
        *,
        out: Any = None,
        wait: bool = True,
        timeout: float | None = None,
    ) -> Any:
        """Returns the arrays of all ranks, [ranks, ...], on rank `root`; None on others."""
        given = _readable(array)
        result = None
        if self.rank == root:
            shape = (self.size, *given.shape)
            result = np.empty(shape, given.dtype) if out is None else _writable(out, given, shape)
        return self._run(_GATHER, given, result, given, wait, timeout, root=root)

    def scatter(
        self,
        array: Any,
        root: int,
        *,
        out: Any = None,
        wait: bool = True,
        timeout: float | None = None,
    ) -> Any:
        """Sends part r of rank `root`'s array, [ranks, ...], to rank r, which gets it in `out`.

        Args:
            array: on rank `root`; other ranks may pass None.
            root: a rank.
            out: of the shape of a part; rank `root` may leave it out.
            wait: return when it has ended.
            timeout: seconds.
        """
        given = self._parts(array) if self.rank == root else None
        if out is None and given is None:
            raise TypeError("smddp: scatter needs `out` on ranks other than the root")
        if given is None:
            result = _writable(out)
        else:
            block = given[0]
            result = np.empty(block.shape, block.dtype) if out is None else _writable(out, block)
        return self._run(_SCATTER, given, result, result, wait, timeout, root=root)

    def alltoall(
        self, array: Any, *, out: Any = None, wait: bool = True, timeout: float | None = None
    ) -> Any:
        """Sends part r of each rank's array, [ranks, ...], to rank r; returns all it gets."""
        given = self._parts(array)
        result = np.empty_like(given, order="C") if out is None else _writable(out, given)
        return self._run(_ALLTOALL, given, result, given[0], wait, timeout)

    def barrier(self, *, wait: bool = True, timeout: float | None = None) -> Any:
        """Returns when all ranks have come."""
        return self._run(_BARRIER, None, None, None, wait, timeout)

    def send(
        self,
        array: Any,
        peer: int,
        *,
        tag: int = 0,
        wait: bool = True,
        timeout: float | None = None,
    ) -> Any:
        """Sends an array to rank `peer`."""
        return self._message(_library.send, _readable(array), peer, tag, wait, timeout)

    def receive(
        self,
        out: Any,
        peer: int = -1,
        *,
        tag: int = 0,
        wait: bool = True,
        timeout: float | None = None,
    ) -> Any:
        """Receives an array of the size of `out` from rank `peer`, or from any; returns `out`."""
        return self._message(_library.receive, _writable(out), peer, tag, wait, timeout)

    def split(self, ranks: Sequence[int]) -> Group | None:
        """Makes groups of some ranks; all ranks of this group call it.

        Args:
            ranks: of this group, in their order in the new one: the members of the group that this
                rank is to be in. A rank that is to be in none passes a list without itself, or an
                empty one.

        Returns:
            The group that this rank is in; None if it is in none.
        """
        members = [_whole(rank) for rank in ranks]
        count = len(members)
        made = ctypes.c_void_p()
        handle = self._use()
        array = (ctypes.c_int * count)(*members)
        _interruptible(lambda: _raise(_library.split(handle, array, count, ctypes.byref(made))))
        return Group(made, members.index(self.rank), count) if made else None

    def abort(self, reason: str = "the program called abort()") -> None:
        """Ends everything in flight on the group, on all ranks."""
        _require_text(reason, "a reason")
        _raise(_library.abort(self._use(), reason.encode()))

    def leave(self) -> None:
        """Waits until this rank's operations have ended, and leaves the group."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            _interruptible(lambda: _raise(_library.leave(handle)))

    def _use(self) -> ctypes.c_void_p:
        if self._handle is None:
            raise ValueError("smddp: this rank has left the group")
        return self._handle

    def _parts(self, array: Any) -> np.ndarray[Any, Any]:
        given = _readable(array)
        if given.ndim == 0 or given.shape[0] != self.size:
            raise ValueError(
                f"smddp: the array needs a part for each of the {self.size} ranks in its first "
                f"dimension, but its shape is {given.shape}"
            )
        return given

    def _run(
        self,
        collective: int,
        given: Any,
        result: Any,
        block: Any,
        wait: bool,
        timeout: float | None,
        **more: Any,
    ) -> Any:
        more["root"] = _whole(more.get("root", 0))
        arguments = _Arguments(collective=collective, timeout=_seconds(timeout), **more)
        if block is not None:
            arguments.count, arguments.type = block.size, _type_of(block)
        if given is not None:
            arguments.input = given.ctypes.data
        if result is not None:
            arguments.output = result.ctypes.data
        return self._begin(_library.begin, arguments, (given, result), result, wait)

    def _message(
        self,
        call: Any,
        array: np.ndarray[Any, Any],
        peer: int,
        tag: int,
        wait: bool,
        timeout: float | None,
    ) -> Any:
        whom = _whole(peer), _whole(tag)
        message = _Message(array.ctypes.data, array.nbytes, *whom, _seconds(timeout))
        return self._begin(call, message, array, array, wait)

    def _begin(self, call: Any, arguments: Any, arrays: Any, result: Any, wait: bool) -> Any:
        handle = self._use()
        number = next(_numbers)
        _held[number] = arrays
        arguments.release, arguments.held = _release, number
        operation = ctypes.c_void_p()
        _raise(call(handle, ctypes.byref(arguments), ctypes.byref(operation)))
        work = Work(self, operation, result)
        return work.wait() if wait else work


def _seconds(timeout: float | None) -> float:
    if timeout is None:
        return 0.0
    if not _number(timeout, "a timeout") > 0:
        raise ValueError(f"smddp: a timeout of {timeout} seconds; it must be more than 0")
    return float(timeout)


def _number(value: Any, what: str) -> float:
    if not isinstance(value, numbers.Real):
        raise TypeError(f"smddp: {what} is a number of seconds, not {value!r}")
    return float(value)


def _require_text(value: Any, what: str) -> None:
    if not isinstance(value, str):
        raise TypeError(f"smddp: {what} is a string, not {value!r}")


def _op(op: Any) -> int:
    try:
        return Op(op)
    except ValueError:
        raise ValueError(
            f"smddp: {op!r} is no Op: it is one of {', '.join(one.name for one in Op)} of "
            "smddp.numpy.Op"
        ) from None


def _whole(number: Any, what: str = "a rank or a tag") -> int:
    """Returns an integer that C can take, which would drop the bits that are too many."""
    try:
        value = operator.index(number)
    except TypeError:
        raise TypeError(f"smddp: {number!r} is no integer: {what} is one") from None
    if not -(2**31) <= value < 2**31:
        raise ValueError(f"smddp: {value} is too large for {what}")
    return value


def _variable(name: str, default: int) -> int:
    """Returns the integer that an environment variable holds."""
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"smddp: {name}={text!r} in the environment is no integer") from None


def _array(value: Any) -> np.ndarray[Any, Any]:
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError("smddp: a mask cannot be communicated: give array.filled(value)")
    if isinstance(value, np.ndarray):
        return value
    if hasattr(value, "__dlpack__"):
        array: np.ndarray[Any, Any] = np.from_dlpack(value)
        return array
    return np.asarray(value)


def _readable(value: Any) -> np.ndarray[Any, Any]:
    given = _array(value)
    # ascontiguousarray() makes one dimension of none.
    array: np.ndarray[Any, Any] = np.ascontiguousarray(given).reshape(given.shape)
    _type_of(array)
    return array


def _require_array(value: Any) -> None:
    if not isinstance(value, np.ndarray) and not hasattr(value, "__dlpack__"):
        raise TypeError(f"smddp: the result cannot be written to a {type(value).__name__}")


def _writable(
    value: Any,
    like: np.ndarray[Any, Any] | None = None,
    shape: tuple[int, ...] | None = None,
    *,
    only_read: bool = False,
) -> np.ndarray[Any, Any]:
    _require_array(value)
    array = _array(value)
    if not array.flags.c_contiguous or not (array.flags.writeable or only_read):
        raise ValueError("smddp: an array that is written to must be C-contiguous and writable")
    _type_of(array)
    if like is not None:
        expected = like.shape if shape is None else shape
        if array.shape != expected or array.dtype != like.dtype:
            raise ValueError(
                f"smddp: the result has shape {expected} and type {like.dtype}, but `out` has "
                f"{array.shape} and {array.dtype}"
            )
    return array


def _type_of(array: np.ndarray[Any, Any]) -> int:
    name = array.dtype.name
    if name not in _TYPES or not array.dtype.isnative:
        raise TypeError(f"smddp: arrays of {array.dtype} cannot be communicated")
    return _TYPES.index(name)


def empty(shape: int | tuple[int, ...], dtype: Any = np.float64) -> np.ndarray[Any, Any]:
    """Returns an uninitialised array in memory that the ranks of a machine share.

    They reduce such arrays in place, without copies. If there is no such memory left, the array
    lies in ordinary memory.
    """
    kind = np.dtype(dtype)
    count = int(np.prod(shape))
    block = _library.allocate(count * kind.itemsize)
    if not block:
        return np.empty(shape, kind)
    owner = _Shared(block, count * kind.itemsize)
    array: Any = np.asarray(owner).view(kind)[:count].reshape(shape)
    return cast("np.ndarray[Any, Any]", array)


class _Shared:
    """Owns a block of communication memory; numpy keeps it alive."""

    def __init__(self, block: int, size: int) -> None:
        self._block = block
        self.__array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (block, False),
            "version": 3,
        }

    def __del__(self) -> None:
        _library.deallocate(self._block)


def init(
    rank: int | None = None,
    size: int | None = None,
    host: str | None = None,
    port: int | None = None,
    timeout: float = 300.0,
) -> Group:
    """Joins the job that a launcher has started, and returns the group of all its ranks.

    Without arguments it reads what smddprun, torchrun, mpirun or srun have set. A process that none
    of them has started is a job of its own.

    Args:
        rank: of this process, instead of RANK.
        size: number of ranks, instead of WORLD_SIZE.
        host: name or address of rank 0's machine, instead of MASTER_ADDR.
        port: on which rank 0 serves the store where the ranks meet. It is not MASTER_PORT, which
            belongs to torch; None means one that is computed from it.
        timeout: seconds that this rank waits for the others, here and in each operation.

    Raises:
        ValueError, TypeError: the arguments or the environment make no sense.
        Error: the ranks have not come, or cannot work together.
    """
    environment.complete_from_launcher()
    environment.print_lines_at_once()
    size = _variable("WORLD_SIZE", 1) if size is None else size
    rank = _variable("RANK", 0) if rank is None else rank
    whole = _whole(rank, "a rank"), _whole(size, "a number of ranks")
    seconds = _number(timeout, "a timeout")
    if host is None:
        if not rendezvous.complete_rendezvous():
            raise ValueError(f"smddp: {rendezvous.UNKNOWN_HOST}")
        host = os.environ["MASTER_ADDR"]
    if port is None:
        name = f"{host}:{os.environ.get('MASTER_PORT', '')}"
        port = 20000 + zlib.crc32(name.encode()) % 8192 if size > 1 else 0
    port = _whole(port, "a port")
    _require_text(host, "a host")
    made = ctypes.c_void_p()
    where = host.encode()
    _interruptible(lambda: _raise(_library.join(where, port, *whole, seconds, ctypes.byref(made))))
    return Group(made, rank, size)
