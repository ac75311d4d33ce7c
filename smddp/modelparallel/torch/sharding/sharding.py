"""`Sharding`: the sharded parameters of a model, and when they are gathered.

Around a module's own code its own parameters are gathered. What autograd keeps of a parameter for
the backward pass is replaced by a note of which part it was, and gathered again when the backward
pass needs it. Code that uses a parameter anywhere else gathers it for one function of torch.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from smddp._torch_internals import SAVED_TENSORS_HOOKS, version_of_tensor
from smddp.modelparallel.core.errors import SMPError, SMPUsageError
from smddp.modelparallel.torch.common.device import put
from smddp.modelparallel.torch.common.engine import forget_failed_passes_at_exit
from smddp.modelparallel.torch.data_parallel.holders import Ranks
from smddp.modelparallel.torch.delayed.life import come_to_life, memory_of, recorders_of
from smddp.modelparallel.torch.job.groups import ShardingGroups
from smddp.modelparallel.torch.pipeline.modules import Modules
from smddp.modelparallel.torch.sharding.gathers import Gathers
from smddp.modelparallel.torch.sharding.gradients import ShardedSum
from smddp.modelparallel.torch.sharding.part import announce, part_of_whole, set_part
from smddp.modelparallel.torch.sharding.rules import is_divisible, is_large, part_of
from smddp.modelparallel.torch.sharding.shard import ParameterShard, ShardedParameter
from smddp.modelparallel.torch.tensor.division import division_of

__all__ = ["Sharding"]

log = logging.getLogger("smddp.modelparallel")


class _Saved(NamedTuple):
    """What autograd keeps of a sharded parameter: which view of it."""

    entry: ShardedParameter
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Kept(NamedTuple):
    """What autograd keeps of any other tensor: an alias, and its version when it was saved."""

    alias: torch.Tensor
    version: int


class _Thread(threading.local):
    """What the task of a thread has gathered, so that its requests do not depend on other tasks.

    Attributes:
        depth: that of contexts in which its code can have parameters gathered.
        holds: how many callers need a parameter gathered, by its number.
        in_backward: parameters of which one of `holds` ends when the gradient is complete, or the
            task ends; by number.
    """

    def __init__(self) -> None:
        self.depth = 0
        self.begin()

    def begin(self) -> None:
        """Begins a task."""
        self.holds: collections.Counter[int] = collections.Counter()
        self.in_backward: dict[int, ShardedParameter] = {}


class Sharding:
    """Divides the parameters of a model over the ranks of a sharding group.

    Attributes:
        groups: the process groups.
        gathers: makes the gathers.
        sums: adds up the gradients.
        entries: the sharded parameters.
    """

    def __init__(
        self,
        groups: ShardingGroups,
        modules: Modules,
        final: Callable[[nn.Parameter], None],
        holders: Callable[[nn.Parameter], Ranks],
        threshold: int,
        limit: int,
        bucket: int,
        ordered: bool,
        timeout: float,
    ) -> None:
        """Begins; nothing is divided yet.

        Args:
            groups: the process groups.
            holders: returns the ranks that have a parameter, or shards of it.
            modules: of the model.
            final: as for GradientSum.
            threshold: parameters with fewer elements stay whole on every rank.
            limit: see Gathers.
            bucket: the elements of a bucket of gradients.
            ordered: see Gathers.
            timeout: see Gathers.
        """
        self.groups = groups
        self.gathers = Gathers(groups.parameters, limit, ordered, timeout)
        self.sums = ShardedSum(final, groups.gradients, bucket)
        self.entries: list[ShardedParameter] = []
        self._modules, self._holders, self._threshold = modules, holders, threshold
        self._by_id: dict[int, ShardedParameter] = {}
        self._of_module: dict[int, list[ShardedParameter]] = {}  # by number of the module
        self._by_placeholder: dict[int, ShardedParameter] = {}  # by its address
        self._by_address: dict[int, ShardedParameter] = {}  # those that are gathered
        self._thread = _Thread()
        SAVED_TENSORS_HOOKS.install(_with_plain_tensors)
        forget_failed_passes_at_exit()
        for parameter in modules.by_number[0].parameters():
            announce(parameter, self._count(parameter))

    # --- what is divided --------------------------------------------------------------------------

    def divides(self, parameter: nn.Parameter) -> bool:
        """Says whether a parameter is, or will be, divided."""
        return is_divisible(parameter) and is_large(parameter.numel(), self._threshold)

    def divide(
        self, parameters: Sequence[nn.Parameter], device: torch.device
    ) -> list[nn.Parameter]:
        """Cuts and frees the large ones among the parameters; takes the first replica's values.

        Args:
            parameters: of this rank.
            device: of the shards. One whole parameter at a time is there.

        Returns:
            What the optimizer works on, for each parameter: its shard, or itself.
        """
        names: dict[int, str] = {}
        for number, module in enumerate(self._modules.by_number):
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    names.setdefault(id(parameter), self._modules.full_name(number, name))
        self._refuse_shared_memory(parameters, names)
        delayed = bool(recorders_of(parameters))
        for parameter in parameters:
            if self.divides(parameter):
                name = names[id(parameter)]
                # It loses this memory at once, also if other parameters shared it.
                come_to_life(parameter, shares=False)
                put(parameter, parameter.data.to(device).contiguous())
                holders = self._holders(parameter).group
                dist.broadcast(parameter.detach(), group=holders, group_src=0)
                entry = ShardedParameter(
                    len(self.entries), name, parameter, self.groups.parameters, self
                )
                self.entries.append(entry)
                self._by_id[id(parameter)] = entry
                self._by_placeholder[entry.placeholder_address()] = entry
        for number, module in enumerate(self._modules.by_number):
            own = {id(p): p for p in module._parameters.values() if p is not None}
            found = [self._by_id[key] for key in own if key in self._by_id]
            if found:
                self._of_module[number] = found
        if delayed:
            # Records have circles of references, and tensors such as a state dict's.
            gc.collect()
        self.gathers.calls.entries = self.entries
        self.sums.adopt(self.entries)
        here = {id(parameter) for parameter in parameters}
        for parameter in self._modules.by_number[0].parameters():
            if id(parameter) not in here:
                set_part(parameter, torch.empty(0, dtype=parameter.dtype))
            elif id(parameter) not in self._by_id:
                self.renew(parameter)
        local = [self.local(parameter) for parameter in parameters]
        if dist.get_rank() == 0:
            log.info(
                "smp: sharding over %d ranks: of %d parameters here, %d are divided, those of at "
                "least %d elements; each rank keeps %.2f of %.2f MiB",
                *(self.groups.parameters.size(), len(parameters), len(self.entries)),
                *(max(self._threshold, 1), _mebibytes(local), _mebibytes(parameters)),
            )
        return local

    def _refuse_shared_memory(
        self, parameters: Sequence[nn.Parameter], names: Mapping[int, str]
    ) -> None:
        """Raises if two parameters that are divided have one memory, which they would lose."""
        found: dict[Any, nn.Parameter] = {}
        for parameter in filter(self.divides, parameters):
            first = found.setdefault(memory_of(parameter), parameter)
            if first is not parameter:
                raise SMPUsageError(
                    f"parameters {names[id(first)]!r} and {names[id(parameter)]!r} share memory, "
                    "and would not with sharded data parallelism: let one nn.Parameter be both, "
                    "as in decoder.weight = encoder.weight"
                )

    def _count(self, parameter: nn.Parameter) -> int:
        """Returns the elements of this rank's part of a parameter that comes to live here."""
        group = self.groups.parameters
        if self.divides(parameter):
            return part_of(parameter.numel(), group.size())
        return parameter.numel() if group.rank() == 0 else 0

    def renew(self, parameter: nn.Parameter) -> None:
        """Notes that a parameter, or the shard of one, has new memory; it lives here."""
        entry = self.entry(parameter)
        group = self.groups.parameters
        set_part(parameter, part_of_whole(parameter, group) if entry is None else entry.shard)

    def note_trained(self, parameters: Iterable[nn.Parameter]) -> None:
        """Gives gradients from now on to parameters that were frozen; not during a step."""
        for parameter in parameters:
            self.local(parameter).requires_grad_()
        self.sums.adopt(self.entries)

    def entry(self, parameter: Any) -> ShardedParameter | None:
        """Returns what is known about a sharded parameter; None for others."""
        return self._by_id.get(id(parameter))

    def local(self, parameter: nn.Parameter) -> nn.Parameter:
        """Returns the shard of a parameter; a parameter that is not divided itself."""
        entry = self._by_id.get(id(parameter))
        return parameter if entry is None else entry.shard

    def reducers(self, parameter: nn.Parameter) -> Ranks | None:
        """Returns the ranks with the same shard; None if the parameter is not a shard."""
        if not isinstance(parameter, ParameterShard):
            return None
        divided = division_of(parameter) is not None
        group = self.groups.across_divided if divided else self.groups.across
        return Ranks(group, group.size())

    # --- a step -----------------------------------------------------------------------------------

    def end_step(self, failed: bool) -> bool:
        """Ends the gathers of a step; see `Gathers.end_step`. Waits for the sums of gradients.

        After any error but SMPError the other ranks may wait for gathers of this one, so it must
        not wait for their sums: it has to leave.
        """
        try:
            try:
                self.sums.flush()
            except dist.DistError:
                failed = True  # `finish` raises, too
            wrong = bool(self.entries) and self.gathers.end_step(failed)
        except SMPError:
            self.sums.finish()
            raise
        finally:
            self._by_address.clear()
        self.sums.finish()
        return wrong

    def take_gradient(self, entry: ShardedParameter) -> torch.Tensor | None:
        """Takes the whole gradient that autograd has left, if any, and frees the parameter."""
        gradient = entry.take_gradient()
        self._end_backward(entry)
        return gradient

    def _end_backward(self, entry: ShardedParameter) -> None:
        if self._thread.in_backward.pop(entry.number, None) is not None:
            self.release(entry)

    # --- for Modules ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def around_task(self) -> Iterator[None]:
        """In this context parameters can be gathered, and autograd keeps none of them."""
        thread = self._thread
        if not thread.depth:
            thread.begin()
        thread.depth += 1
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                yield
            if thread.depth == 1:
                # Parameters whose gradient has not come are not needed any more.
                for entry in list(thread.in_backward.values()):
                    self._end_backward(entry)
        finally:
            thread.depth -= 1
            if not thread.depth:
                thread.begin()

    @contextlib.contextmanager
    def around_module(self, number: int) -> Iterator[None]:
        """In this context the own parameters of a module are gathered."""
        with contextlib.ExitStack() as stack:
            if not self._thread.depth:
                stack.enter_context(self.around_task())
            for entry in self._of_module.get(number, ()):
                self.hold(entry)
                stack.callback(self.release, entry)
            yield

    # --- for FreedParameter; see Gatherer --------------------------------------------------------

    def reads(self) -> bool:
        """Says whether parameters can be gathered now."""
        return self._thread.depth > 0

    def hold(self, entry: ShardedParameter) -> None:
        """Gathers a parameter, unless this task holds it already."""
        # In the forward pass, too, what was sent of earlier gradients leaves memory at once.
        self.sums.add_completed()
        holds = self._thread.holds
        if not holds[entry.number]:
            self.gathers.hold(entry)
            assert entry.flat is not None
            self._by_address[entry.flat.untyped_storage().data_ptr()] = entry
        holds[entry.number] += 1

    def release(self, entry: ShardedParameter) -> None:
        """Ends one `hold`; the last one of all tasks frees the parameter."""
        holds = self._thread.holds
        if not holds[entry.number]:  # the task has failed meanwhile
            return
        holds[entry.number] -= 1
        if holds[entry.number]:
            return
        flat = entry.flat
        try:
            self.gathers.release(entry)
        finally:
            if flat is not None and entry.flat is None:
                self._by_address.pop(flat.untyped_storage().data_ptr(), None)

    # --- for autograd -----------------------------------------------------------------------------

    def _pack(self, tensor: torch.Tensor) -> _Saved | _Kept:
        """Returns what autograd keeps of a tensor.

        It is an alias, if not a part of a parameter: the tensor itself may be the output of the
        node that keeps it, and Python could not free such a cycle of references.
        """
        return self._part(tensor) or _Kept(tensor.detach(), version_of_tensor(tensor))

    _pack.of_sharded_parameters = True  # type: ignore[attr-defined]

    def _part(self, tensor: torch.Tensor) -> _Saved | None:
        if tensor.layout != torch.strided or tensor.is_meta:
            return None
        try:
            address = tensor.untyped_storage().data_ptr()
        except RuntimeError:  # a tensor without memory of its own, as under torch.func
            return None
        entry = self._by_address.get(address)
        if entry is not None:
            return _Saved(entry, tensor.size(), tensor.stride(), int(tensor.storage_offset()))
        entry = self._by_placeholder.get(address)
        if entry is not None and tensor.shape == entry.shape:
            # A function of a class of its own has kept it, which has not gathered it.
            strides = torch.empty(entry.shape, device="meta").stride()
            return _Saved(entry, entry.shape, strides, 0)
        return None

    def _unpack(self, kept: _Saved | _Kept) -> torch.Tensor:
        if isinstance(kept, _Kept):
            alias = kept.alias
            # Autograd itself does not compare versions where there are hooks.
            if version_of_tensor(alias) != kept.version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an "
                    f"inplace operation: a {alias.dtype} tensor of shape {list(alias.shape)} is at "
                    f"version {version_of_tensor(alias)}, and was saved at version {kept.version}. "
                    "torch.autograd.set_detect_anomaly(True) shows the operation that saved it"
                )
            return alias
        entry = kept.entry
        self.hold(entry)
        assert entry.flat is not None
        view = entry.flat.as_strided(kept.size, kept.stride, kept.offset)
        thread = self._thread
        if thread.depth and entry.shard.requires_grad and entry.number not in thread.in_backward:
            thread.in_backward[entry.number] = entry  # until its gradient has come
        else:
            self.release(entry)  # the view keeps the memory
        return view

    # --- outside a step ---------------------------------------------------------------------------

    def whole(self, entry: ShardedParameter) -> torch.Tensor:
        """Returns the values of a parameter; all ranks of the group have to call it."""
        self.hold(entry)
        try:
            return entry.parameter.detach()
        finally:
            self.release(entry)

    def replace(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        """Returns entries of a state dict with whole parameters in place of the sharded ones.

        All ranks of the group have to call it.
        """
        found = dict(entries)
        values: dict[int, torch.Tensor] = {}  # a shared parameter is gathered once
        for name, value in entries.items():
            entry = self.entry(value)
            if entry is not None:
                if id(entry) not in values:
                    values[id(entry)] = self.whole(entry)
                found[name] = values[id(entry)]
        return found


class _KeepsValues:
    """The pack hook of other code, such as a checkpoint's, which gets parameters as plain tensors.

    Autograd passes some parameters as they are. The hook may keep them until the backward pass, and
    they would be freed meanwhile. A plain tensor keeps the memory.
    """

    def __init__(self, hook: Callable[[torch.Tensor], Any]) -> None:
        self._hook = hook

    def __call__(self, tensor: torch.Tensor) -> Any:
        if isinstance(tensor, nn.Parameter) and "entry" in tensor.__dict__:
            tensor = tensor.detach().requires_grad_(tensor.requires_grad)
        return self._hook(tensor)

    def __getattr__(self, name: str) -> Any:
        # torch's checkpoints mark their hooks.
        return getattr(self.__dict__["_hook"], name)


def _with_plain_tensors(original: Any) -> Any:
    """Lets hooks of other code see sharded parameters as plain tensors."""

    @functools.wraps(original)
    def enter(self: Any) -> None:
        own = getattr(self.pack_hook, "__self__", None)
        if isinstance(own, Sharding):
            original(self)
            return
        hook = self.pack_hook
        self.pack_hook = _KeepsValues(hook)
        try:
            original(self)
        finally:
            self.pack_hook = hook

    return enter


def _mebibytes(tensors: Iterable[torch.Tensor]) -> float:
    return sum(one.numel() * one.element_size() for one in tensors) / 2**20
