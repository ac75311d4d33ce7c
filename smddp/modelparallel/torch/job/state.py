"""The one object per process that holds what `smp.init` has made.

Public functions read `state`, because scripts call them without any context. Functions inside the
library receive what they need as arguments where that is possible; the pipeline and data_parallel
do not know `state`.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol, TypeVar, cast

from smddp.modelparallel.core.config import Configuration
from smddp.modelparallel.core.errors import SMPInitializationError, SMPUsageError
from smddp.modelparallel.core.topology import Topology
from smddp.modelparallel.torch.job.groups import Groups

__all__ = ["State", "state"]

_Kind = TypeVar("_Kind")

_FIRST = "call smp.init() first"


class Closable(Protocol):
    """What lives until `smp.shutdown`."""

    def close(self) -> None:
        """Ends it."""


class _ModuleManager:
    """Stands for the module manager of the original library, which some scripts use.

    Attributes:
        translate_functions: translations of the state dicts of tensor-parallel models. There are
            none without tensor parallelism.
    """

    def __init__(self) -> None:
        self.translate_functions: list[tuple[Any, Any]] = []


class State:
    """What exists between `smp.init` and `smp.shutdown`.

    Attributes:
        module_manager: see `_ModuleManager`.
        model: a weak reference to that of the script; None before there is one.
        optimizers: weak references to those of the script, in the order in which they were made.
            The classes of both are in folders that import this file, so their type here is Any.
        tracing: is the model being traced?
        in_step: is a step running?
        owns_default_group: has `smp.init` made the default process group?
    """

    def __init__(self) -> None:
        self.module_manager = _ModuleManager()
        self.clear()

    def clear(self) -> None:
        """Restores the state before `smp.init`."""
        self._cfg: Configuration | None = None
        self._topology: Topology | None = None
        self._groups: Groups | None = None
        self.owns_default_group = False
        self.model: weakref.ref[Any] | None = None
        self.optimizers: list[weakref.ref[Any]] = []
        self._kept: dict[type[Any], Closable] = {}
        self.tracing = False
        self.in_step = False

    @property
    def initialized(self) -> bool:
        """Whether `smp.init` has been called."""
        return self._cfg is not None

    @property
    def cfg(self) -> Configuration:
        """The configuration in force, one attribute per key."""
        if self._cfg is None:
            raise SMPInitializationError(_FIRST)
        return self._cfg

    @property
    def topology(self) -> Topology:
        """The place of this rank in the job."""
        if self._topology is None:
            raise SMPInitializationError(_FIRST)
        return self._topology

    @property
    def groups(self) -> Groups:
        """The process groups."""
        if self._groups is None:
            raise SMPInitializationError(_FIRST)
        return self._groups

    def current_model(self) -> Any:
        """Returns the script's smp.DistributedModel; None if there is none, or it is gone."""
        return self.model() if self.model is not None else None

    def current_optimizers(self) -> list[Any]:
        """Returns those of the script's smp.DistributedOptimizers that still exist."""
        found = [optimizer for one in self.optimizers if (optimizer := one()) is not None]
        self.optimizers = [weakref.ref(optimizer) for optimizer in found]
        return found

    def current_optimizer(self) -> Any:
        """Returns the script's last smp.DistributedOptimizer; None if there is none."""
        return next(reversed(self.current_optimizers()), None)

    def refuse_in_step(self, call: str, why: str = "only one rank would make the call") -> None:
        """Raises if the body of a step, or a module that it calls, makes a call; hooks may.

        Args:
            call: for the text.
            why: likewise.

        Raises:
            SMPUsageError: see above.
        """
        model = self.current_model()
        task = None if model is None else model.runtime.executor.baton.task
        if task is not None and task.frame is not None:
            raise SMPUsageError(
                f"{call} has to be outside the function decorated with smp.step: {why}"
            )

    def refuse_alone_in_step(self, call: str) -> None:
        """Does the same for a call that all ranks of a divided model have to make.

        Raises:
            SMPUsageError: see `refuse_in_step`; not if each rank has the whole model.
        """
        if self.topology.size_of("mp") > 1 or self.groups.sharding is not None:
            self.refuse_in_step(call)

    def keep(self, thing: Closable) -> None:
        """Keeps an object until `smp.shutdown`, which closes it; one of each class."""
        self._kept[type(thing)] = thing

    def kept(self, kind: type[_Kind]) -> _Kind | None:
        """Returns the object of a class that was kept; None if there is none."""
        return cast("_Kind | None", self._kept.get(kind))

    def close(self) -> None:
        """Closes what is kept."""
        for thing in self._kept.values():
            thing.close()

    @property
    def param_index_to_name_tp_group(self) -> list[dict[int, str]]:
        """Per tensor-parallel rank, the name of each parameter by its number in the optimizer.

        Raises:
            SMPInitializationError: there is no smp.DistributedModel or smp.DistributedOptimizer.
        """
        model, optimizer = self.current_model(), self.current_optimizer()
        if model is None or optimizer is None:
            raise SMPInitializationError("create model and optimizer first")
        numbers = optimizer._param_id_to_index()
        named = model.get_module().named_parameters()
        names = {numbers[id(p)]: name for name, p in named if id(p) in numbers}
        return [dict(names) for _ in range(self.topology.tp_size)]

    @property
    def param_name_to_index_tp_group(self) -> list[dict[str, int]]:
        """Per tensor-parallel rank, the number of each parameter in the optimizer by its name."""
        groups = self.param_index_to_name_tp_group
        return [{name: number for number, name in names.items()} for names in groups]

    def fill(self, cfg: Configuration, topology: Topology, groups: Groups, owns: bool) -> None:
        """Sets everything at the end of `smp.init`, so that a failed `smp.init` leaves nothing."""
        self._cfg, self._topology, self._groups = cfg, topology, groups
        self.owns_default_group = owns


state = State()
