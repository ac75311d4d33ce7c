"""The modules of a model, by number, and on which rank of the pipeline each lives."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from smddp.modelparallel.core.errors import SMPUsageError
from smddp.modelparallel.torch.pipeline.randomness import may_draw

__all__ = ["Modules", "difference"]

# `difference` names at most so many modules of each side.
_NAMED = 5


def difference(names: Sequence[str], others: Sequence[str], who: str, other: str) -> str:
    """Says how the modules of two models differ, for the text of an error.

    Args:
        names: of the modules of one model, in their order.
        others: those of the other model.
        who: has the one model.
        other: has the other model.

    Returns:
        A text; empty if the names are the same, in the same order.
    """
    found = []
    for mine, theirs, owner in ((names, others, who), (others, names, other)):
        only = sorted(set(mine) - set(theirs), key=list(mine).index)
        if only:
            more = f" and {len(only) - _NAMED} more" if len(only) > _NAMED else ""
            found.append(f"only {owner} has {', '.join(map(repr, only[:_NAMED]))}{more}")
    if not found and list(names) != list(others):
        pairs = zip(names, others, strict=False)
        first, second = next(((a, b) for a, b in pairs if a != b), ("", ""))
        found.append(f"the order differs: {who} has {first!r} where {other} has {second!r}")
    return "; ".join(found)


class Modules:
    """The modules of the model, by number, and who owns them.

    A module's number is its place in `root.modules()`, the same on all ranks.

    Attributes:
        rank: this one of the pipeline.
        by_number: the modules.
        names: by number; the root's is "model".
        numbers: by the id of the module.
        owners: ranks of the pipeline, by number; None for modules without parameters and buffers,
            which run where their input is.
        divided: do modules live on other ranks?
        draw: by number: may a call of the module draw random numbers?
    """

    def __init__(self, root: nn.Module, rank: int) -> None:
        """Finds them; until a division all live on rank 0.

        Args:
            root: the model.
            rank: this one of the pipeline.
        """
        self.rank = rank
        self.by_number = list(root.modules())
        by_id = {id(module): name for name, module in reversed(list(root.named_modules()))}
        self.names = [by_id[id(module)] or "model" for module in self.by_number]
        self.numbers = {id(module): number for number, module in enumerate(self.by_number)}
        self.draw = [may_draw(module) for module in self.by_number]
        self.owners: list[int | None] = [0] * len(self.by_number)
        self.divided = False
        self._inside: dict[int, list[int]] = {}

    def set_owners(self, owners: Sequence[int | None]) -> None:
        """Sets the owners, by number."""
        self.owners = list(owners)
        self.divided = any(owner not in (None, self.rank) for owner in self.owners)

    def number_of(self, module: nn.Module) -> int | None:
        """Returns the number of a module; None if it is not of the model."""
        return self.numbers.get(id(module))

    def full_name(self, number: int, name: str) -> str:
        """Returns the name in the model of a parameter or buffer.

        Args:
            number: of the module that has it.
            name: in that module.
        """
        return f"{self.names[number]}.{name}" if number else name

    def lives_here(self, number: int) -> bool:
        """Says whether calls of a module that are made here run here."""
        return self.owners[number] in (None, self.rank)

    def inside(self, number: int) -> list[int]:
        """Returns the numbers of a module and of those inside it."""
        inside = self._inside.get(number)
        if inside is None:
            parts = self.by_number[number].modules()
            inside = [self.numbers[id(part)] for part in parts if id(part) in self.numbers]
            self._inside[number] = inside
        return inside

    def layers(self, number: int) -> list[int]:
        """Returns the numbers of the modules of an nn.Sequential, in their order.

        Raises:
            SMPUsageError: one of them is not of the model.
        """
        layers = self.by_number[number]._modules.values()
        found = [self.numbers.get(id(layer), -1) for layer in layers]
        if -1 in found:
            raise SMPUsageError(
                f"layer {found.index(-1)} of {self.names[number]!r} was put there after "
                "smp.DistributedModel, so it is not part of the model"
            )
        return found
