"""`Decision`: where each module lives. `Placement`: which modules live on this rank."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from smddp._torch_internals import non_persistent_buffers, state_dict_hooks, storage_address
from smddp.modelparallel.core.errors import SMPPartitionError
from smddp.modelparallel.torch.common.device import put
from smddp.modelparallel.torch.delayed.life import (
    become_empty,
    come_to_life,
    is_delayed,
    memory_of,
    recorders_of,
    settle,
)
from smddp.modelparallel.torch.pipeline.modules import Modules, difference
from smddp.modelparallel.torch.pipeline.reads import Homes
from smddp.modelparallel.torch.pipeline.remote_tensor import (
    Home,
    RemoteBuffers,
    RemoteTensor,
    release_memory,
)
from smddp.modelparallel.torch.pipeline.step import Form

__all__ = ["MARKER", "Decision", "Placement", "costs_by_size", "own_bytes", "shared_buffers"]

# The key that marks a state dict, of a model or an optimizer, as that of one rank only.
MARKER = "_smp_is_partial"


def own_bytes(modules: Sequence[nn.Module]) -> list[int]:
    """Returns the bytes of each module's own parameters and buffers, each counted once."""
    seen: set[int] = set()
    found = []
    for module in modules:
        size = 0
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                size += tensor.numel() * tensor.element_size()
        found.append(size)
    return found


def costs_by_size(modules: Sequence[nn.Module]) -> list[dict[str, float]]:
    """Returns costs for a `Decision` that was made without a trace."""
    sizes = own_bytes(modules)
    whole = sum(sizes) or 1
    return [{"bytes": float(size), "seconds": 0.0, "cost": size / whole} for size in sizes]


def shared_buffers(modules: Modules, owners: Sequence[int | None]) -> list[tuple[int, str, int]]:
    """Returns the buffers that cannot live with their modules, as in `Decision.shared`.

    Buffers that share memory live where the first of them does, or a parameter that shares it,
    because a change of one is a change of all.

    Args:
        modules: of the model.
        owners: of the modules, by number.
    """
    memory = _Memory()
    found = []
    for kind in ("_parameters", "_buffers"):
        for number, module in enumerate(modules.by_number):
            for name, tensor in getattr(module, kind).items():
                own = owners[number]
                if tensor is None or own is None:
                    continue
                owner = memory.owner(tensor, own)
                if owner != own and kind == "_buffers":
                    found.append((number, name, owner))
    return found


@dataclasses.dataclass
class Decision:
    """Where every module lives: the division of the model, as plain data to be sent and saved.

    Attributes:
        names: of the modules, by number.
        owners: for each module, by number: its partition, which is also the owner's rank in the
            pipeline; None for modules without state, which run where their input is.
        costs: per module, without those inside it: "bytes", "seconds", and "cost" as a share of the
            whole model, from 0 to 1. For `smp.explain` and the log.
        cut_bytes: bytes that cross borders between partitions, per microbatch and direction.
        method: how the decision was made; for messages.
        shared: (number of the module, name, owner) of each buffer that lives where another tensor
            does whose memory it shares, and not where its module does.
    """

    names: list[str]
    owners: list[int | None]
    costs: list[dict[str, float]] = dataclasses.field(default_factory=list)
    cut_bytes: float = 0.0
    method: str = "manual"
    shared: list[tuple[int, str, int]] = dataclasses.field(default_factory=list)

    @property
    def parts(self) -> int:
        """The number of partitions that are used."""
        return 1 + max(owner for owner in self.owners if owner is not None)

    def rows(self, part: int) -> list[tuple[str, dict[str, float]]]:
        """Returns name and cost of each module of a partition."""
        rows = zip(self.names, self.owners, self.costs, strict=True)
        return [(name, cost) for name, owner, cost in rows if owner == part]

    def share(self, part: int) -> float:
        """Returns the share of a partition in the whole cost."""
        return sum(cost["cost"] for _, cost in self.rows(part))

    def check(self, names: list[str]) -> None:
        """Checks that it was made for a model with these modules.

        Raises:
            SMPPartitionError: it was not.
        """
        if self.names != names:
            raise SMPPartitionError(
                "the decision belongs to another model: "
                + difference(self.names, names, "the decision", "the model")
            )

    def fits(self, names: list[str], parts: int) -> bool:
        """Says whether it can be used for these modules and this number of partitions."""
        return self.names == names and self.parts <= parts

    @staticmethod
    def one_partition(modules: Modules) -> Decision:
        """Returns the decision for one partition."""
        owners: list[int | None] = [0] * len(modules.names)
        costs = costs_by_size(modules.by_number)
        return Decision(list(modules.names), owners, costs, method="one partition")

    def as_dict(self) -> dict[str, Any]:
        """Returns it as data for JSON."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Decision:
        """Returns what `as_dict` was made of; ignores entries that this version does not know."""
        known = {field.name for field in dataclasses.fields(Decision)}
        return Decision(**{name: value for name, value in data.items() if name in known})


class Placement:
    """Which modules, parameters and buffers live on this rank.

    Attributes:
        rank, size: in the pipeline.
        pins: the partitions that `set_partition` has asked for, by module number.
        decision: the one that has been applied; None before that.
        from_checkpoint: the decision of a checkpoint, which is used again if it fits.
        device: of what lives here.
        gathered: this rank has the values of all other ranks, too, until the next step.
    """

    def __init__(self, modules: Modules, reads: Homes, rank: int, size: int) -> None:
        self._modules, self._reads = modules, reads
        self.rank, self.size = rank, size
        self.pins: dict[int, int] = {}
        self.decision: Decision | None = None
        self.from_checkpoint: Decision | None = None
        self.device = torch.device("cpu")
        self.gathered = False
        self._entries: dict[str, int] = {}
        self._local: set[int] = set()
        # Where the parameters live that are on other ranks, by id.
        self._homes: dict[int, Home] = {}
        # Forms of the buffers that live here, by number and name: those that the other ranks know,
        # and those from when the step began.
        self._known_forms: dict[tuple[int, str], Form | None] = {}
        self._forms_before: dict[tuple[int, str], Form | None] = {}
        # The model as it was wrapped: names do not change if a script wraps it again later.
        self._root = modules.by_number[0]

    @property
    def divided(self) -> bool:
        """Whether a decision has been applied."""
        return self.decision is not None

    def pin(self, module: nn.Module, partition: int) -> None:
        """Assigns a module, and everything inside it that has no pin of its own, to a partition.

        Raises:
            SMPPartitionError: the module or the partition does not exist.
        """
        number = self._modules.number_of(module)
        if number is None:
            raise SMPPartitionError("set_partition: the module is not part of the model")
        if not isinstance(partition, int) or not 0 <= partition < self.size:
            raise SMPPartitionError(
                f"set_partition: there are {self.size} partitions, from 0, and no {partition}"
            )
        self.pins[number] = partition

    def apply(
        self,
        decision: Decision,
        device: torch.device,
        stays: Callable[[nn.Parameter], bool] | None = None,
    ) -> None:
        """Applies a decision: moves what lives here to a device, and empties the rest.

        Args:
            decision: to apply.
            device: of what lives here.
            stays: says which parameters stay as they are, because somebody else moves them.

        Raises:
            SMPPartitionError: the decision belongs to another model, or divides a shared parameter.
        """
        decision.check(self._modules.names)
        homes = self._parameter_homes(decision, device)
        owners = {number: home.owner for number, home in homes.items()}
        buffer_owners = self._buffer_owners(decision)
        self.decision, self.device = decision, device
        self._modules.set_owners(decision.owners)
        recorders = recorders_of((*self._root.parameters(), *self._root.buffers()))
        for prefix, module in self._root.named_modules(remove_duplicate=False):
            number = self._modules.number_of(module)
            assert number is not None
            owner = decision.owners[number]
            dot = f"{prefix}." if prefix else ""
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    self._entries[dot + name] = owners[id(parameter)]
            for name in module._buffers:
                self._entries[dot + name] = buffer_owners[number, name]
            self._entries[f"{dot}_extra_state"] = self.rank if owner is None else owner
        self._name_as_hooks_do()
        for number in range(len(self._modules.by_number)):
            self._place_buffers(number, buffer_owners, device)
        for parameter in list(self._root.parameters()):
            home = homes[id(parameter)]
            if home.owner == self.rank:
                self._local.add(id(parameter))
                if stays is None or not stays(parameter):
                    come_to_life(parameter)
                    put(parameter, parameter.data.to(device))
            else:
                self._homes[id(parameter)] = home
                become_empty(parameter)
                release_memory(parameter, home)
        pairs = zip(self._modules.by_number, decision.owners, strict=True)
        settle(recorders, [module for module, owner in pairs if owner in (None, self.rank)])
        self._known_forms = self._forms()
        self._forms_before = dict(self._known_forms)

    def _name_as_hooks_do(self) -> None:
        """Notes who owns the entries of the state dict that hooks of modules have renamed."""
        if not any(state_dict_hooks(module) for module in self._root.modules()):
            return
        named: Iterator[tuple[str, torch.Tensor]] = itertools.chain(
            self._root.named_parameters(remove_duplicate=False),
            self._root.named_buffers(remove_duplicate=False),
        )
        owners = {id(tensor): self._entries[name] for name, tensor in named}
        for name, value in self._root.state_dict(keep_vars=True).items():
            if id(value) in owners:
                self._entries.setdefault(name, owners[id(value)])

    def _place_buffers(
        self, number: int, owners: dict[tuple[int, str], int], device: torch.device
    ) -> None:
        """Moves the buffers of a module to the device, or empties them, by where they live."""
        module = self._modules.by_number[number]
        homes: dict[str, Home] = {}
        for name, buffer in list(module._buffers.items()):
            if owners[number, name] != self.rank:
                home = self._reads.home("buffer", number, name, owners[number, name], device)
                homes[name] = home
                if buffer is not None and not isinstance(buffer, RemoteTensor):
                    become_empty(buffer)
                    release_memory(buffer, home)
            elif buffer is not None:
                come_to_life(buffer)
                module._buffers[name] = buffer.to(device)
        owner = self._modules.owners[number]
        elsewhere = owner is not None and owner != self.rank
        if homes or elsewhere:

            def make(name: str) -> Home:
                assert owner is not None
                return self._reads.home("buffer", number, name, owner, device)

            module.__dict__["_buffers"] = RemoteBuffers(
                module._buffers, homes, make if elsewhere else None
            )

    def _parameter_homes(self, decision: Decision, device: torch.device) -> dict[int, Home]:
        homes: dict[int, Home] = {}
        by_memory: dict[Any, Home] = {}
        for number, module in enumerate(self._modules.by_number):
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                owner = decision.owners[number]
                assert owner is not None
                home = self._reads.home("parameter", number, name, owner, device)
                homes.setdefault(id(parameter), home)
                if (first := by_memory.setdefault(memory_of(parameter), home).owner) != owner:
                    raise SMPPartitionError(
                        f"parameter {name!r} of {self._modules.names[number]!r} is shared with a "
                        f"module of partition {first}, but would live on {owner}: "
                        "modules that share parameters have to be on the same partition"
                    )
        return homes

    def _buffer_owners(self, decision: Decision) -> dict[tuple[int, str], int]:
        """Returns the owner of each buffer, by number of the module and name."""
        found: dict[tuple[int, str], int] = {}
        for number, module in enumerate(self._modules.by_number):
            owner = decision.owners[number]
            for name in module._buffers:
                found[number, name] = self.rank if owner is None else owner
        return {**found, **{(number, name): owner for number, name, owner in decision.shared}}

    # --- buffers whose form changes ---------------------------------------------------------------

    def _forms(self) -> dict[tuple[int, str], Form | None]:
        """Returns the forms of the buffers that live here."""
        found: dict[tuple[int, str], Form | None] = {}
        owners = self._modules.owners
        for number, module in enumerate(self._modules.by_number):
            buffers = module._buffers
            remote = buffers if isinstance(buffers, RemoteBuffers) else None
            if not buffers or (remote is None and owners[number] != self.rank):
                continue
            for name, buffer in dict.items(buffers):
                if remote is not None and remote.home(name) is not None:
                    continue
                form = None
                if buffer is not None:
                    persistent = name not in non_persistent_buffers(module)
                    form = Form(buffer.shape, buffer.dtype, persistent)
                found[number, name] = form
        return found

    def begin_step(self) -> None:
        """Empties what lives elsewhere, if `gathered`; notes the forms of buffers here."""
        if not self.divided:
            return
        if self.gathered:
            self._empty_again()
        self._forms_before = self._forms()

    def changed_forms(self) -> tuple[dict[tuple[int, str], Form | None], bool]:
        """Returns what is new about the forms of the buffers that live here.

        Returns:
            The forms that the other ranks do not know yet, by number of the module and name; and
            whether any form has changed since `begin_step`.
        """
        known, forms = self._known_forms, self._forms()
        new = {
            place: form
            for place, form in forms.items()
            if place not in known or known[place] != form
        }
        return new, forms != self._forms_before

    def accept_forms(self, rank: int, forms: dict[tuple[int, str], Form | None]) -> None:
        """Applies what a rank has told all others about the forms of its buffers.

        If the rank is this one, it notes what the others know now; else it gives the buffers these
        forms.
        """
        if rank == self.rank:
            self._known_forms.update(forms)
            return
        for (number, name), form in forms.items():
            module = self._modules.by_number[number]
            buffers = module._buffers
            assert isinstance(buffers, RemoteBuffers)
            if form is None:
                buffers.clear_place(name)
                continue
            buffers.put(name, form.shape, form.dtype)
            change = non_persistent_buffers(module)
            (change.discard if form.persistent else change.add)(name)

    def _empty_again(self) -> None:
        self.gathered = False
        for parameter in self._root.parameters():
            home = self._homes.get(id(parameter))
            if home is not None and not isinstance(parameter, RemoteTensor):
                release_memory(parameter, home)
        for module in self._modules.by_number:
            if isinstance(module._buffers, RemoteBuffers):
                module._buffers.release_memory()

    def is_local(self, module: nn.Module) -> bool:
        """Says whether a module lives here; one without an owner counts for rank 0."""
        number = self._modules.number_of(module)
        if number is None or self.decision is None:
            return False
        owner = self.decision.owners[number]
        return owner == self.rank or (owner is None and self.rank == 0)

    def parameters(self) -> list[nn.Parameter]:
        """Returns the parameters that live here."""
        return [parameter for parameter in self._root.parameters() if self.owns(parameter)]

    def known(self) -> set[int]:
        """Returns the ids of the model's parameters; not of those put there since it is divided.

        Modules that were put there after the model was wrapped do not count.
        """
        if self.divided:
            return self._local | self._homes.keys()
        own = (part._parameters.values() for part in self._modules.by_number)
        return {id(parameter) for parameters in own for parameter in parameters}

    def owns(self, parameter: nn.Parameter) -> bool:
        """Says whether a parameter lives here."""
        return id(parameter) in self._local

    def lives_elsewhere(self, parameter: Any) -> bool:
        """Says whether something is a parameter of the model that lives on another rank."""
        return id(parameter) in self._homes

    def owns_buffer(self, name: str) -> bool:
        """Says whether the buffer with a name of the original model lives here."""
        return self.owner_of_entry(name) == self.rank

    def owner_of_entry(self, name: str) -> int:
        """Returns the partition of an entry of the state dict.

        A buffer that was registered later has the owner of its module.
        """
        if name not in self._entries:
            return self._entries.get(f"{name.rpartition('.')[0]}._extra_state".lstrip("."), 0)
        return self._entries[name]


class _Memory:
    """Which rank owns which memory."""

    def __init__(self) -> None:
        self._by_id: dict[int, int] = {}
        # Per storage, by its address: (first address, end, owner).
        self._ranges: dict[int, list[tuple[int, int, int]]] = {}

    def owner(self, tensor: torch.Tensor, owner: int) -> int:
        """Returns the owner of a tensor's memory: the given one, unless it had another before."""
        if id(tensor) in self._by_id:
            return self._by_id[id(tensor)]
        kinds = (torch.Tensor, nn.Parameter)
        plain = type(tensor) in kinds and tensor.layout == torch.strided
        if (plain or is_delayed(tensor)) and tensor.numel():
            owner = self._of_range(tensor, owner)
        self._by_id[id(tensor)] = owner
        return owner

    def _of_range(self, tensor: torch.Tensor, owner: int) -> int:
        storage = tensor.untyped_storage()
        # A delayed tensor has no address, but its storage is a place in memory, too.
        address = storage_address(storage) if is_delayed(tensor) else storage.data_ptr()
        begin = int(tensor.storage_offset()) * tensor.element_size()
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        end = begin + tensor.element_size() * (1 + sum((n - 1) * step for n, step in steps))
        ranges = self._ranges.setdefault(address, [])
        for first, last, holder in ranges:
            if begin < last and first < end:
                owner = holder
                break
        ranges.append((begin, end, owner))
        return owner
