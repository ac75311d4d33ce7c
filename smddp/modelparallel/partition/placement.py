"""`Decision`: where each module lives. `Placement`: which of them live on this rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from smddp.modelparallel.common.errors import SMPPartitionError
from smddp.modelparallel.pipeline.modules import Modules, difference
from smddp.modelparallel.pipeline.remote_parameter import Home, empty

__all__ = ["MARKER", "Decision", "Placement", "costs_by_size", "own_bytes"]

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


@dataclasses.dataclass
class Decision:
    """Where every module lives, as plain data that can be sent and saved.

    Attributes:
        names: of the modules, by number.
        owners: partitions, by number; None for modules without state, which run where their input
            is.
        costs: per module, without those inside it: "bytes", "seconds", and "cost" as a share of the
            whole model, from 0 to 1. For `smp.explain` and the log.
        cut_bytes: bytes that cross borders between partitions, per microbatch and direction.
        method: how it was found; for texts.
    """

    names: list[str]
    owners: list[int | None]
    costs: list[dict[str, float]] = dataclasses.field(default_factory=list)
    cut_bytes: float = 0.0
    method: str = "manual"

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
                "the partition decision belongs to another model: "
                + difference(self.names, names, "the decision", "the model")
            )

    def fits(self, names: list[str], parts: int) -> bool:
        """Says whether it can be used for these modules and this number of partitions."""
        return self.names == names and self.parts <= parts

    @staticmethod
    def everything_here(modules: Modules) -> Decision:
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
        pins: partitions that the script has asked for, by module number.
        decision: that has been applied; None before.
        from_checkpoint: the decision of a checkpoint, which is used again if it fits.
        device: of what lives here.
    """

    def __init__(self, modules: Modules, rank: int, size: int) -> None:
        self._modules = modules
        self.rank, self.size = rank, size
        self.pins: dict[int, int] = {}
        self.decision: Decision | None = None
        self.from_checkpoint: Decision | None = None
        self.device = torch.device("cpu")
        self._entries: dict[str, int] = {}
        self._local: set[int] = set()
        # The model as it was wrapped: names do not change if a script wraps it again later.
        self._root = modules.by_number[0]

    @property
    def applied(self) -> bool:
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

    def apply(self, decision: Decision, device: torch.device) -> None:
        """Applies a decision: moves what lives here to a device, and empties other parameters.

        Raises:
            SMPPartitionError: the decision belongs to another model, or divides a shared parameter.
        """
        decision.check(self._modules.names)
        homes = self._homes(decision, device)
        owners = {number: home.owner for number, home in homes.items()}
        self.decision, self.device = decision, device
        self._modules.set_owners(decision.owners)
        for prefix, module in self._root.named_modules(remove_duplicate=False):
            number = self._modules.number_of(module)
            assert number is not None
            owner = decision.owners[number]
            dot = f"{prefix}." if prefix else ""
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    self._entries[dot + name] = owners[id(parameter)]
            for name in module._buffers:
                self._entries[dot + name] = self.rank if owner is None else owner
            self._entries[f"{dot}_extra_state"] = self.rank if owner is None else owner
            if owner is None or owner == self.rank:
                for name, buffer in module._buffers.items():
                    if buffer is not None:
                        module._buffers[name] = buffer.to(device)
        for parameter in list(self._root.parameters()):
            if owners[id(parameter)] == self.rank:
                self._local.add(id(parameter))
                parameter.data = parameter.data.to(device)
            else:
                empty(parameter, homes[id(parameter)])

    def _homes(self, decision: Decision, device: torch.device) -> dict[int, Home]:
        homes: dict[int, Home] = {}
        for number, module in enumerate(self._modules.by_number):
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                owner = decision.owners[number]
                assert owner is not None
                home = self._modules.home(number, name, owner, device)
                if (first := homes.setdefault(id(parameter), home).owner) != owner:
                    raise SMPPartitionError(
                        f"parameter {name!r} of {self._modules.names[number]!r} is shared with a "
                        f"module of partition {first}, but would live on {owner}: "
                        "modules that share parameters have to be on the same partition"
                    )
        return homes

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

    def owns(self, parameter: nn.Parameter) -> bool:
        """Says whether a parameter lives here."""
        return id(parameter) in self._local

    def owns_buffer(self, name: str) -> bool:
        """Says whether the buffer with a name of the original model lives here."""
        return self._entries.get(name, 0) == self.rank

    def owner_of_entry(self, name: str) -> int:
        """Returns the partition of an entry of the state dict."""
        return self._entries.get(name, 0)
