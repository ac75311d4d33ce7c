"""A model whose modules live on the ranks of a pipeline: its parts, on one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from smddp.modelparallel.torch.pipeline.asker import ModelAsker
from smddp.modelparallel.torch.pipeline.calls import CallerSide
from smddp.modelparallel.torch.pipeline.changes import Changes
from smddp.modelparallel.torch.pipeline.hooks import ForwardHooks
from smddp.modelparallel.torch.pipeline.learned import Findings, Learned
from smddp.modelparallel.torch.pipeline.local_calls import LocalCalls
from smddp.modelparallel.torch.pipeline.modules import Modules
from smddp.modelparallel.torch.pipeline.parameters import Parameters
from smddp.modelparallel.torch.pipeline.reads import Homes, OwnValues
from smddp.modelparallel.torch.pipeline.routing import Routing
from smddp.modelparallel.torch.pipeline.services import RankServices
from smddp.modelparallel.torch.pipeline.step import Schedule
from smddp.modelparallel.torch.pipeline.takeover import Takeover

__all__ = ["PipelineModel"]


class PipelineModel:
    """What a rank knows about a model and its calls. Each part alone changes what it has.

    Attributes:
        modules: by number, and where they live.
        parameters: their names.
        learned: what callers have learned about calls.
        changes: what code of steps changes.
        hooks: the forward hooks of the modules.
        values: of the parameters and buffers that other ranks read.
        homes: of the parameters and buffers of other ranks.
        local: runs calls on this rank.
        routing: decides where a call runs.
        takeover: takes calls over from torch.
    """

    def __init__(
        self, services: RankServices, caller: CallerSide, root: nn.Module, forwarding: bool = True
    ) -> None:
        """Makes the parts; nothing is divided or taken over yet.

        Args:
            services: of this rank.
            caller: collects and sends calls.
            root: the model.
            forwarding: see `Learned`.
        """
        current, member = services.baton.current, services.member
        self.modules = Modules(root, services.rank)
        self.parameters = Parameters(self.modules)
        self.learned = Learned(forwarding)
        self.changes = Changes(self.modules, self.parameters)
        self.hooks = ForwardHooks(self.modules)
        self.values = OwnValues(self.modules)
        self.local = LocalCalls(
            current,
            self.modules,
            self.changes,
            self.hooks,
            self.values,
            None if member is None else member.entered,
        )
        self.routing = Routing(
            services, caller, self.modules, self.learned, self.changes, self.hooks, self.local
        )
        self.homes = Homes(self.modules, self.routing, current)
        asker = ModelAsker(current, self.modules, self.parameters, caller, self.changes)
        self.takeover = Takeover(current, self.modules, self.parameters, self.routing, asker)

    def begin_step(
        self,
        schedule: Schedule,
        body: Callable[..., Any] | None,
        looks: bool,
        in_order: bool,
        again: bool,
    ) -> None:
        """Begins a step, on the thread of its caller.

        Args:
            schedule: of the step.
            body: its function, if there are several partitions; None with one.
            looks: see `Changes.begin_step`.
            in_order: do the microbatches run one after the other?
            again: is it run a second time?
        """
        self.learned.begin_step(again)
        self.changes.begin_step(looks, again, body)
        self.values.begin_step()
        self.homes.begin_step(in_order)
        self.local.begin_step(schedule)
        self.hooks.begin_step()

    def buffers_in_question(self) -> set[str]:
        """Returns the buffers here whose changes in this step depend on the order of microbatches.

        Other ranks have read them, or modules were called out of order.
        """
        modules = self.modules
        places = set(self.values.read)
        for number in self.local.out_of_order:
            places.update((number, name) for name in modules.by_number[number]._buffers)
        return {modules.full_name(*place) for place in places}

    @property
    def order_matters(self) -> bool:
        """Whether anything else that code has changed depends on the order of microbatches."""
        kept = not self.changes.keepers.isdisjoint(self.local.out_of_order)
        return kept or self.changes.order_matters

    def end_step(self, findings: Findings | None) -> None:
        """Lets the next steps use what this step has found.

        Args:
            findings: see `Learned.end_step`; None if the step has ended without.
        """
        if findings is not None:
            self.learned.end_step(findings)
            self.changes.end_step()
