"""Keeps arguments of checkpointed calls out of memory until the backward pass comes near.

Tensors of the CPU go to a scratch file, tensors of a device to pinned memory of the host. Which of
them are in memory depends on the order in which they are needed, not on time: see `Offloader`.
"""

from __future__ import annotations

import collections
import itertools
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Protocol

import torch

from smddp._torch_internals import StorageWeakRef, storage_address
from smddp.modelparallel.core.errors import SMPUsageError
from smddp.modelparallel.torch.common.buffers import version_of

__all__ = ["Offloader"]

# Smaller tensors stay in memory: moving them takes longer than it is worth.
SMALL = 4096
# Seconds that a task waits for the scratch file.
_TIMEOUT = 300.0


class Offloader:
    """The arguments that calls have saved, in batches; a batch is what one task needs.

    After each change of what is saved or of what runs, `plan` chooses the batches that have to be
    in memory; the others leave it. So a batch comes back some tasks before it is needed. If it is
    needed and not there, the task waits.
    """

    def __init__(
        self,
        plan: Callable[[list[Hashable]], Sequence[Hashable]],
        owned: Callable[[], Iterable[torch.Tensor]],
    ) -> None:
        """Begins without batches.

        Args:
            plan: gets the keys of all batches in the order in which they were begun, and returns
                those that have to be in memory, in the order in which they are needed.
            owned: returns the tensors of the model that live here; they and what shares their
                memory are not moved.
        """
        self._plan, self._owned = plan, owned
        self._batches: dict[Hashable, list[weakref.ref[_Item]]] = {}
        # By memory, place in it and version: a tensor that is saved twice is moved once.
        self._known: weakref.WeakValueDictionary[Hashable, _Item] = weakref.WeakValueDictionary()
        self._numbers = itertools.count()
        self._kept_memory: set[int] | None = None
        self._file = _ScratchFile()
        self._hosts: dict[torch.device, _HostMemory] = {}

    def begin_step(self) -> None:
        """Forgets an earlier step: its failure, its batches, and the memory of the model."""
        self._kept_memory = None
        self._batches.clear()
        self._file.begin_step()

    def keep(self, key: Hashable, tensors: Sequence[torch.Tensor]) -> Callable[[], list[Any]]:
        """Saves tensors.

        Args:
            key: of the batch; None for a batch of their own, whose key is a number that grows.
            tensors: they must not be changed in place until they are fetched.

        Returns:
            A function that returns the same values, detached. As long as it lives, they are kept.

        Raises:
            SMPUsageError: the scratch file cannot be written.
        """
        if key is None:
            key = next(self._numbers)
        items = [self._item(tensor) for tensor in tensors]
        for item in items:
            item.uses += 1
        flags = [tensor.requires_grad for tensor in tensors]
        moved = [weakref.ref(item) for item in items if item.mover is not None]
        if moved:
            self._batches.setdefault(key, []).extend(moved)
        del tensors
        self.balance()

        def fetch() -> list[torch.Tensor]:
            values = [item.take() for item in items]
            self.balance()
            return [
                value.detach().requires_grad_(flag)
                for value, flag in zip(values, flags, strict=True)
            ]

        return fetch

    def balance(self) -> None:
        """Moves batches out of memory and back, as planned.

        Raises:
            SMPUsageError: the scratch file cannot be written.
        """
        self._file.check()
        alive: dict[Hashable, list[_Item]] = {}
        for key, references in list(self._batches.items()):
            items = [item for reference in references if (item := reference()) is not None]
            if items:
                alive[key] = items
            else:
                del self._batches[key]
        near = self._plan(list(alive))
        wanted: dict[_Item, None] = {}
        for key in near:
            wanted.update(dict.fromkeys(alive.get(key, ())))
        leaving = [i for items in alive.values() for i in items if i not in wanted and i.is_near()]
        # Otherwise arguments would fill the memory while they wait to be moved.
        for mover in {id(item.mover): item.mover for item in leaving}.values():
            assert mover is not None
            mover.await_moves()
        for item in leaving:
            item.leave()
        for item in wanted:
            item.come_back()

    def _item(self, tensor: torch.Tensor) -> _Item:
        storage = tensor.untyped_storage()
        place = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        key = (storage_address(storage), *place, version_of(tensor))
        item = self._known.get(key)
        if item is None:
            mover = self._mover(tensor) if self._moves(tensor) else None
            item = self._known[key] = _Item(tensor, mover)
        return item

    def _moves(self, tensor: torch.Tensor) -> bool:
        """Says whether a tensor can leave memory, and whether that is worth it."""
        if type(tensor) is not torch.Tensor or tensor.layout != torch.strided:
            return False
        if tensor.nbytes < SMALL or 0 in tensor.stride() or tensor.is_inference():
            return False
        if tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            return False
        if self._kept_memory is None:
            self._kept_memory = {one.untyped_storage().data_ptr() for one in self._owned()}
        return tensor.untyped_storage().data_ptr() not in self._kept_memory

    def _mover(self, tensor: torch.Tensor) -> _Mover:
        if tensor.device.type == "cpu":
            return self._file
        if tensor.device not in self._hosts:
            self._hosts[tensor.device] = _HostMemory(tensor.device)
        return self._hosts[tensor.device]


class _Away(Protocol):
    """A value that is elsewhere, or on its way. It moves while tasks run."""

    def leave(self) -> None:
        """Frees its memory as soon as that can be; nothing needs it soon."""

    def come_back(self) -> None:
        """Begins to move it back, unless that has begun."""

    def value(self) -> torch.Tensor:
        """Returns it, and waits for it."""

    def forget(self) -> None:
        """Does not hold what has come back any longer."""

    def is_near(self) -> bool:
        """Says whether it has to be told to leave."""


class _Mover(Protocol):
    """Moves the values of tensors out of memory, and back."""

    def move_out(self, value: _Original) -> _Away:
        """Begins to move a value out."""

    def await_moves(self) -> None:
        """Waits until the values that leave have left."""


class _Original:
    """A tensor that was saved, and that code must not change in place."""

    def __init__(self, tensor: torch.Tensor) -> None:
        # Has the same memory and version, without the autograd graph.
        self._tensor = tensor.detach()
        self._version = version_of(tensor)

    def tensor(self) -> torch.Tensor:
        """Returns it.

        Raises:
            SMPUsageError: it has been changed.
        """
        if version_of(self._tensor) != self._version:
            raise SMPUsageError(
                "an argument of a module with activation checkpointing was changed in place after "
                "the call: its activations cannot be computed again. Change a clone()"
            )
        return self._tensor


class _Item:
    """What an `Offloader` knows of a tensor that was saved.

    Attributes:
        mover: moves it; None if it stays in memory.
        uses: how often it will probably be taken yet.
    """

    def __init__(self, tensor: torch.Tensor, mover: _Mover | None) -> None:
        self._original: _Original | None = _Original(tensor)
        # No other memory can have its address as long as this lives; see `Offloader._known`.
        self._memory = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self.mover = mover
        self._away: _Away | None = None
        self.uses = 0

    def is_near(self) -> bool:
        """Says whether it has to be told to leave."""
        return self._away is None or self._away.is_near()

    def leave(self) -> None:
        """Begins to move it out of memory."""
        if self._away is not None:
            self._away.leave()
            return
        assert self.mover is not None
        assert self._original is not None
        self._away = self.mover.move_out(self._original)
        self._original = None

    def come_back(self) -> None:
        """Begins to move it back, if it will be taken."""
        if self._away is not None and self.uses > 0:
            self._away.come_back()

    def take(self) -> torch.Tensor:
        """Returns it, and waits for it; it may be taken again.

        Raises:
            SMPUsageError: it has been changed in place, or the scratch file cannot be used.
        """
        self.uses -= 1
        if self._away is not None:
            value = self._away.value()
            if self.uses <= 0:
                # It lives as long as its user needs it. If it is taken again, it comes back again.
                self._away.forget()
            return value
        assert self._original is not None
        return self._original.tensor()


class _ScratchFile:
    """Values of the CPU, in a file without a name, which ends with this process.

    A thread writes and reads.

    Attributes:
        error: why it could not; empty if it could. A text, because an exception would keep
            everything alive that its traceback refers to.
    """

    def __init__(self) -> None:
        self.error = ""
        self._file: Any = None
        self._jobs: collections.deque[_InFile] = collections.deque()
        self._busy = False
        # Guards what `_InFile` changes; notified when a job has ended.
        self.changed = threading.Condition()
        # Places by size in bytes. Appending needs no lock: a finalizer does it.
        self._free: collections.defaultdict[int, collections.deque[int]] = collections.defaultdict(
            collections.deque
        )
        self._end = 0

    def move_out(self, value: _Original) -> _InFile:
        """Begins to move a value out; see `_Mover`."""
        away = _InFile(self, value)
        self.add(away)
        return away

    def await_moves(self) -> None:
        """Waits until there are no jobs; see `_Mover`."""
        with self.changed:
            self.wait_for(lambda: not self._busy)

    def wait_for(self, done: Callable[[], bool]) -> None:
        """Waits until a condition holds; the caller holds `changed`.

        Raises:
            SMPUsageError: a job has failed.
        """
        if not self.changed.wait_for(lambda: done() or self.error, _TIMEOUT):
            raise SMPUsageError(
                f"offload_activations: the scratch file in {_folder()} has not answered for "
                f"{_TIMEOUT:.0f} s. Set TMPDIR to a folder on another disk"
            )
        self.check()

    def check(self) -> None:
        """Raises if a job has failed.

        Raises:
            SMPUsageError: a job has failed.
        """
        if self.error:
            raise SMPUsageError(self.error)

    def begin_step(self) -> None:
        """Forgets the error of an earlier step, if its jobs end; else this step fails, too.

        Gives the room of the file back if no value is in it: a place is only used again for a value
        of its size, so the file would grow with each new size of a batch.
        """
        with self.changed:
            if self.error:
                self.changed.wait_for(lambda: not self._busy, _TIMEOUT)
            if self._busy:
                return
            self.error = ""
            if self._file and self._end == sum(size * len(at) for size, at in self._free.items()):
                self._free.clear()
                self._end = 0
                os.ftruncate(self._file.fileno(), 0)

    def add(self, away: _InFile) -> None:
        """Adds a job; the thread begins with the first one."""
        with self.changed:
            self._jobs.append(away)
            if not self._busy:
                self._busy = True
                threading.Thread(target=self._work, name="smp-offload", daemon=True).start()

    def _work(self) -> None:
        while True:
            with self.changed:
                if not self._jobs:
                    self._busy = False
                    self.changed.notify_all()
                    return
                away = self._jobs.popleft()
            try:
                away.work()
            except OSError as error:
                self.error = (
                    f"offload_activations: the scratch file in {_folder()} cannot be used: {error}."
                    " Set TMPDIR to a folder with more room, or turn offload_activations off"
                )
            except Exception as error:
                self.error = f"offload_activations: {error}"
            del away
            with self.changed:
                self.changed.notify_all()

    def write(self, data: memoryview) -> int:
        """Writes bytes, and returns where they are; only the thread calls this.

        Raises:
            OSError: it cannot.
        """
        if self._file is None:
            self._file = tempfile.TemporaryFile(  # noqa: SIM115  open as long as this process
                prefix="smp-activations-", dir=_folder(), buffering=0
            )
        free = self._free[len(data)]
        if free:
            place = free.popleft()
        else:
            place, self._end = self._end, self._end + len(data)
        done = 0
        try:
            while done < len(data):
                done += os.pwrite(self._file.fileno(), data[done:], place + done)
        except OSError:
            self.free(place, len(data))
            raise
        return place

    def read(self, data: memoryview, place: int) -> None:
        """Reads bytes; only the thread calls this.

        Raises:
            OSError: it cannot.
        """
        done = 0
        while done < len(data):
            read = os.preadv(self._file.fileno(), [data[done:]], place + done)
            if read == 0:
                raise OSError("it has ended early")
            done += read

    def free(self, place: int, size: int) -> None:
        """Lets a place be used again."""
        self._free[size].append(place)


def _folder() -> str:
    # tempfile would take another folder without a word if this one cannot be used.
    return os.environ.get("TMPDIR") or tempfile.gettempdir()


class _InFile:
    """A value in a scratch file; see `_Away`."""

    def __init__(self, file: _ScratchFile, value: _Original) -> None:
        self._file = file
        self._like = torch.empty_strided(
            *(value.tensor().shape, value.tensor().stride()),
            dtype=value.tensor().dtype,
            device="meta",
        )
        self._size = value.tensor().nbytes
        self._original: _Original | None = value
        self._back: torch.Tensor | None = None
        self._place: int | None = None
        self._wanted = False

    def leave(self) -> None:
        with self._file.changed:
            self._wanted = False
            self._back = None
            stays = self._original is not None
        if stays:  # it had come back before it was written
            self._file.add(self)

    def come_back(self) -> None:
        with self._file.changed:
            begun = self._wanted
            self._wanted = True
            missing = self._original is None and self._back is None
        if missing and not begun:
            self._file.add(self)

    def is_near(self) -> bool:
        return self._wanted

    def value(self) -> torch.Tensor:
        self.come_back()
        with self._file.changed:
            self._file.wait_for(lambda: self._original is not None or self._back is not None)
            original, back = self._original, self._back
        if original is not None:
            return original.tensor()
        assert back is not None
        return back

    def forget(self) -> None:
        with self._file.changed:
            self._back = None
            self._wanted = self._original is not None

    def work(self) -> None:
        """Writes or reads, whatever is missing; the thread calls this."""
        with self._file.changed:
            original, place, wanted = self._original, self._place, self._wanted
        if original is not None and not wanted:
            if place is None:
                data = original.tensor().contiguous()
                place = self._file.write(_bytes(data))
                weakref.finalize(self, self._file.free, place, self._size).atexit = False
            original.tensor()  # has it been changed meanwhile?
            with self._file.changed:
                self._place = place
                if not self._wanted:
                    self._original = None
        elif original is None and wanted and self._back is None:
            assert place is not None
            back = torch.empty(self._like.shape, dtype=self._like.dtype)
            self._file.read(_bytes(back), place)
            if back.stride() != self._like.stride():
                strided = torch.empty_strided(
                    *(self._like.shape, self._like.stride()), dtype=back.dtype
                )
                back = strided.copy_(back)
            with self._file.changed:
                if self._wanted:
                    self._back = back


def _bytes(tensor: torch.Tensor) -> memoryview:
    """Returns the memory of a contiguous tensor of the CPU."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


class _HostMemory:
    """Values of a device, in pinned memory of the host. A stream of its own copies them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.Stream(device=device)
        self._leaving: list[weakref.ref[_OnHost]] = []
        # The memory of a copy must not be freed before it has ended: ends, targets and sources.
        self._copying: collections.deque[tuple[torch.Event, torch.Tensor, torch.Tensor]] = (
            collections.deque()
        )

    def move_out(self, value: _Original) -> _OnHost:
        """Begins to move a value out; see `_Mover`."""
        away = _OnHost(self, value)
        self._leaving.append(weakref.ref(away))
        return away

    def await_moves(self) -> None:
        """Waits for the copies to the host; see `_Mover`."""
        for reference in self._leaving:
            away = reference()
            if away is not None:
                away.await_copy()
        self._leaving.clear()
        self._release()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> torch.Event:
        """Copies on the stream, after what the current stream has to do; returns the end."""
        before, after = torch.Event(self.device), torch.Event(self.device)
        before.record(torch.accelerator.current_stream(self.device))
        self.stream.wait_event(before)
        with self.stream:
            target.copy_(source, non_blocking=True)
        after.record(self.stream)
        self._release()
        self._copying.append((after, target, source))
        return after

    def _release(self) -> None:
        """Frees what copies have needed that have ended."""
        while self._copying and self._copying[0][0].query():
            self._copying.popleft()


class _OnHost:
    """A value in pinned memory; see `_Away`."""

    def __init__(self, memory: _HostMemory, value: _Original) -> None:
        self._memory = memory
        tensor = value.tensor()
        self._form = tensor.shape, tensor.stride()
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        self._copied = memory.copy(self._host, tensor)
        # Held until it is copied.
        self._original: _Original | None = value
        self._back: tuple[torch.Tensor, torch.Event] | None = None
        self._wanted = False

    def await_copy(self) -> None:
        """Waits until the value is on the host, and frees its memory on the device."""
        if self._original is not None and not self._wanted:
            self._copied.synchronize()
            self._original.tensor()  # has it been changed meanwhile?
            self._original = None

    def leave(self) -> None:
        self._wanted = False
        self._back = None
        self.await_copy()

    def come_back(self) -> None:
        self._wanted = True
        if self._original is None and self._back is None:
            shape, stride = self._form
            back = torch.empty_strided(
                shape, stride, dtype=self._host.dtype, device=self._memory.device
            )
            self._back = back, self._memory.copy(back, self._host)

    def is_near(self) -> bool:
        return self._wanted

    def value(self) -> torch.Tensor:
        self.come_back()
        if self._original is not None:
            return self._original.tensor()
        assert self._back is not None
        back, copied = self._back
        torch.accelerator.current_stream(self._memory.device).wait_event(copied)
        return back

    def forget(self) -> None:
        self._back = None
        self._wanted = self._original is not None
