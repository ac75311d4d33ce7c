"""The process groups of a rank, one for each `CommGroup`; `smp.init` makes them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed import distributed_c10d

from smddp._torch_internals import (
    device_types,
    is_absent,
    name_of_ranks,
    timeout_of_options,
)
from smddp._torch_internals import (
    world as c10d_world,
)
from smddp.modelparallel.core.topology import Topology
from smddp.modelparallel.torch.job.collectives import Collectives
from smddp.torch import _C
from smddp.torch.backend import backend_of

__all__ = ["Groups", "NextNames", "ShardingGroups", "timeout_of"]

_KINDS = ("mp", "dp", "tp", "pp", "rdp")
_Sets = tuple[tuple[int, ...], ...]  # all groups of a kind, each by its ranks


class ShardingGroups(NamedTuple):
    """The process groups of sharded data parallelism.

    Attributes:
        parameters: the ranks that share the parameters, for gathers. They have one tp rank.
        gradients: the same ranks, for sums of gradients, which do not wait for gathers.
        across: the ranks that have the same shard of a parameter.
        across_divided: likewise, of a parameter that is divided over tensor-parallel ranks.
    """

    parameters: dist.ProcessGroup
    gradients: dist.ProcessGroup
    across: dist.ProcessGroup
    across_divided: dist.ProcessGroup


class Groups:
    """The process groups of a rank.

    Scripts can get those of `of`. The others keep smp's messages apart from the scripts' own.
    All groups have the timeout of the default group.

    Attributes:
        messages: all ranks, for `smp.send` and the like.
        pipeline: the ranks of the pipeline, for its messages.
        order: this rank's order group, for its messages; None if no ranks have to agree on an
            order.
        exchange: the ranks of the tp group, for activations. Reductions of gradients do not wait
            for these.
        sharding: those of sharded data parallelism; None without it.
    """

    def __init__(
        self,
        topology: Topology,
        sharding_degree: int = 1,
        order: Sequence[tuple[int, ...]] = (),
        alike: bool = False,
    ) -> None:
        """Makes the groups; all ranks have to do it.

        Args:
            topology: the place of this rank.
            sharding_degree: of sharded data parallelism.
            order: all order groups; none if no ranks have to agree on an order.
            alike: have all ranks the same `NextNames.hashed`?
        """
        world = dist.group.WORLD
        assert world is not None
        maker = _Maker(topology.rank, world, alike)
        everybody = (tuple(range(topology.size)),)
        self._of_steps = maker.groups_of(_KINDS, topology, {})
        self._by_kind = {
            "world": world,
            **maker.groups_of(("mp", "tp", "pp"), topology, {everybody: world}),
            # Scripts reduce gradients in these, in hooks; so that is done in steps, too.
            "dp": self._of_steps["dp"],
            "rdp": self._of_steps["rdp"],
        }
        self.messages = maker.group_of(everybody)
        self.pipeline = maker.group_of(topology.groups("pp"))
        self.order: dist.ProcessGroup | None = None
        if order:
            self.order = maker.group_of(order)
        exchange = self._of_steps["tp"]
        if topology.tp_size > 1:
            exchange = maker.group_of(topology.groups("tp"))
        self.exchange = Collectives(exchange)
        self.sharding: ShardingGroups | None = None
        if sharding_degree > 1:
            parts = topology.in_blocks("rdp", sharding_degree)
            across = [
                tuple(topology.across_blocks(kind, sharding_degree)) for kind in ("dp", "rdp")
            ]
            # Without tensor parallelism both have the same members.
            groups = {sets: maker.group_of(sets) for sets in dict.fromkeys(across)}
            self.sharding = ShardingGroups(
                *(maker.group_of(parts) for _ in range(2)),
                *(groups[sets] for sets in across),
            )

    def of(self, kind: str) -> dist.ProcessGroup:
        """Returns this rank's group of a kind, which is a value of `CommGroup`, such as "pp"."""
        return self._by_kind[kind]

    def of_steps(self, kind: str) -> dist.ProcessGroup:
        """Returns a group with the same ranks, for calls of steps and of optimizers only.

        It ends when a rank leaves. Those of `of` live on after a signal, for saving, but for "dp"
        and "rdp", which are the same.
        """
        return self._of_steps[kind]

    def abort(self, reason: str, lost: bool) -> None:
        """Ends every wait in these groups, on all ranks, and every later one.

        Only smddp's groups can do that. With others, ranks wait until this process ends, or the
        timeout.

        Args:
            reason: for the errors of the other ranks.
            lost: a rank is gone, so what needs all ranks of the model cannot work any more.
                Otherwise only the groups of steps end: a script may still save the model.
        """
        ended = [self.pipeline, self.order, self.exchange.group, *(self.sharding or ())]
        ended += self._of_steps.values()
        if lost:
            ended += [self.messages, *self._by_kind.values()]
        for group in dict.fromkeys(ended):
            # The default group is not smp's to end.
            if group is None or group is dist.group.WORLD:
                continue
            for kind in device_types(group):
                backend = backend_of(group, kind.type)
                if isinstance(backend, _C.ProcessGroup):
                    backend.abort_because(reason)

    def close(self) -> None:
        """Forgets the groups. Whoever has made the default group destroys it."""
        self._by_kind.clear()
        self._of_steps.clear()


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Returns the timeout of a group. Without it, new groups would get torch's default."""
    for kind in device_types(group):
        try:
            timeout: timedelta = timeout_of_options(backend_of(group, kind.type).options)
        except (AttributeError, RuntimeError):
            continue
        return timeout
    return dist.default_pg_timeout


class NextNames(NamedTuple):
    """How c10d would name the next group; None if this torch does not say it.

    Ranks that know a group by different names wait for each other in vain.

    Attributes:
        numbered: that all ranks make. It differs between ranks in torch 2.15 after
            `new_group(…, use_local_synchronization=True)` on some of them.
        hashed: that its ranks make alone. It differs between ranks then, and before torch 2.15
            after any group that not all ranks are in.
    """

    numbered: int | None
    hashed: str | None

    @classmethod
    def now(cls) -> NextNames:
        """Returns those of this rank."""
        made = None if is_absent(c10d_world) else c10d_world(distributed_c10d)
        hashed = None if is_absent(name_of_ranks) else name_of_ranks([0])
        return cls(getattr(made, "group_count", None), hashed)


class _Maker:
    """Makes process groups. Each is one of several sets of ranks; each rank is in one of them."""

    def __init__(self, rank: int, world: dist.ProcessGroup, alike: bool) -> None:
        """Notes how.

        Args:
            rank: of this process in the job.
            world: the default group.
            alike: see `Groups`.
        """
        self._rank, self._timeout = rank, timeout_of(world)
        # Where c10d splits groups of a device, ranks that are not in a group have to take part.
        self._alone = alike and world.bound_device_id is None and dist.get_backend() != "mpi"

    def groups_of(
        self, kinds: Sequence[str], topology: Topology, made: dict[_Sets, dist.ProcessGroup]
    ) -> dict[str, dist.ProcessGroup]:
        """Returns this rank's group of each of these kinds.

        Some kinds have the same members: mp and pp, for instance, without tensor parallelism.
        `made` has the groups that exist.
        """
        found = {}
        for kind in kinds:
            sets = tuple(topology.groups(kind))
            if sets not in made:
                made[sets] = self.group_of(sets)
            found[kind] = made[sets]
        return found

    def group_of(self, sets: Sequence[tuple[int, ...]]) -> dist.ProcessGroup:
        """Returns this rank's group of these; all ranks have to call it, in the same order.

        c10d demands that all ranks make all groups, in one order, because names of groups are
        numbers: 265 calls on each of 64 ranks, for instance. With local synchronization a rank
        makes its own only; see `NextNames`.
        """
        if self._alone:
            (mine,) = (members for members in sets if self._rank in members)
            sets = [mine]
        for members in sets:
            group = dist.new_group(
                list(members), timeout=self._timeout, use_local_synchronization=self._alone
            )
            if isinstance(group, dist.ProcessGroup):
                found = group
        return found
