"""*Main parameters*: what an optimizer's groups have in place of the model's parameters.

In half precision these are copies in fp32 (see half.py), with sharded data parallelism shards, and
with both, copies of shards in fp32. Otherwise the optimizer has the parameters themselves.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from smddp._torch_internals import unscale_gradients
from smddp.modelparallel.torch.common.structure import map_tensors
from smddp.modelparallel.torch.job.state import state
from smddp.modelparallel.torch.optimizer.clipping import largest
from smddp.modelparallel.torch.optimizer.flat_groups import FlatGroups, OriginalGroups
from smddp.modelparallel.torch.optimizer.half import HALF
from smddp.modelparallel.torch.optimizer.loss_scale import LossScaler
from smddp.modelparallel.torch.partition.placement import Placement
from smddp.modelparallel.torch.sharding.shard import ParameterShard, ShardedParameter
from smddp.modelparallel.torch.sharding.sharding import Sharding
from smddp.modelparallel.torch.tensor.division import copy_division

__all__ = ["MainParameters"]

log = logging.getLogger("smddp.modelparallel")


class _SteppedElsewhere:
    """Stands for the main parameter of a parameter that another replica steps; has its gradient.

    Attributes:
        dtype: of the gradient.
        grad: the unscaled gradient; None if there is none.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.grad: torch.Tensor | None = None


class _Row(NamedTuple):
    """What belongs to one parameter.

    Attributes:
        parameter: that of the model.
        local: what this rank has of it, and what gets the gradient: its shard, or itself.
        main: what the optimizer has; the same as `local` in full precision.
        entry: of a sharded parameter.
    """

    parameter: nn.Parameter
    local: nn.Parameter
    main: nn.Parameter | _SteppedElsewhere
    entry: ShardedParameter | None


class MainParameters:
    """What one optimizer has in place of the parameters that live on this rank.

    They exist once it is decided which parameters those are. With sharded data parallelism they are
    shards of the parameters. In half precision they are fp32 copies of parameters or shards. There,
    a parameter in full precision has a main parameter, too, which shares its memory; so gradients
    are always unscaled on copies.

    Attributes:
        scaler: holds the loss scale; 1 in full precision.
        half: does the model compute in half precision, so that there are copies in fp32?
        overflow: was a gradient infinite when gradients were last copied to the main parameters?
    """

    def __init__(self, optimizer: Any, scaler: LossScaler, half: bool) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.scaler, self.half = scaler, half
        self.overflow = False
        self._originals: dict[int, nn.Parameter] = {}  # by the id of the main parameter
        self._rows: list[_Row] = []
        self._elsewhere: dict[int, _SteppedElsewhere] = {}  # by the id of the parameter
        self._device = torch.device("cpu")
        self._taken = False  # have the gradients of the last step been copied here?
        self._flat = FlatGroups(optimizer, self.original, self._aliases)
        if state.groups.sharding is not None:
            optimizer.fp16_groups = OriginalGroups(optimizer, self.original)
            optimizer.fp32_partitioned_groups_flat = self._flat
            optimizer.ds_param_shard_group = state.groups.sharding.parameters

    def original(self, parameter: nn.Parameter) -> nn.Parameter:
        """Returns the model's parameter of a main parameter; any other one itself."""
        return self._originals.get(id(parameter), parameter)

    def _aliases(self, main: nn.Parameter) -> list[nn.Parameter]:
        """Returns what shares memory with a main parameter: what is in full precision."""
        return [
            row.local
            for row in self._rows
            if row.main is main is not row.local and row.local.dtype not in HALF
        ]

    def with_gradient(self, parameter: nn.Parameter) -> Any:
        """Returns what has the gradient of a parameter in the optimizer's groups."""
        return self._elsewhere.get(id(parameter), parameter)

    def adopt(
        self,
        placement: Placement,
        sharding: Sharding | None,
        steps: Callable[[nn.Parameter], bool] = lambda _: True,
    ) -> None:
        """Puts main parameters into the optimizer's groups, for the parameters that live here.

        Args:
            placement: knows which parameters live here.
            sharding: knows the shards; None without sharded data parallelism.
            steps: says whether this rank steps a parameter; others have no main parameter here.
        """
        self._device = placement.device
        optimizer: Any = self._optimizer()
        for group in optimizer.param_groups:
            for place, parameter in enumerate(group["params"]):
                known = id(parameter) in self._originals or id(parameter) in self._elsewhere
                has_gradient = parameter.is_floating_point() or parameter.is_complex()
                if known or not (placement.owns(parameter) and has_gradient):
                    continue
                if not steps(parameter):
                    dtype = torch.float32 if parameter.dtype in HALF else parameter.dtype
                    other = self._elsewhere[id(parameter)] = _SteppedElsewhere(dtype)
                    copy_division(parameter, other)
                    self._rows.append(_Row(parameter, parameter, other, None))
                    continue
                entry = None if sharding is None else sharding.entry(parameter)
                row, main = self._row(parameter, entry)
                if main is parameter:
                    continue
                self._originals[id(main)] = parameter
                self._rows.append(row)
                group["params"][place] = main
                if parameter in optimizer.state:
                    own = _in_dtype_of(main, parameter, optimizer.state.pop(parameter))
                    optimizer.state[main] = own if entry is None else entry.cut_state(own)
        if self.half:
            halves = {id(main) for _, main in self._copies()}
            optimizer.fp32_from_fp16_groups = [
                [main for main in group["params"] if id(main) in halves]
                for group in optimizer.param_groups
            ]
            self._show()
        if sharding is not None:
            self._flat.adopt(placement, sharding)

    def _row(
        self, parameter: nn.Parameter, entry: ShardedParameter | None
    ) -> tuple[_Row, nn.Parameter]:
        """Returns the row of a parameter that this rank steps, and its main parameter."""
        local = parameter if entry is None else entry.shard
        main = local
        if self.half:
            data = local.detach()
            value = data.float() if data.dtype in HALF else data
            if entry is None:
                main = nn.Parameter(value, local.requires_grad)
                copy_division(parameter, main)
            else:
                main = ParameterShard.of(value, local, entry.shard.group)
        return _Row(parameter, local, main, entry), main

    def copy_from_parameters(self) -> None:
        """Copies the parameters to the main parameters, after parameters have been loaded."""
        with torch.no_grad():
            for row, main in self._copies():
                main.copy_(row.local)

    # --- a step -----------------------------------------------------------------------------------

    def note_new_gradients(self) -> None:
        """Notes that there are new gradients."""
        self._taken = False

    def update(self) -> None:
        """In half precision, copies the gradients to the main parameters and unscales them.

        All ranks of the model have to call it; they agree on whether there is an overflow.
        """
        if not self.half:
            return
        gradients = []
        for row in self._rows:
            gradient, main = row.local.grad, row.main
            main.grad = None if gradient is None else gradient.to(main.dtype, copy=True)
            if main.grad is not None:
                gradients.append(main.grad)
        self._unscale(gradients)
        self._taken = True
        self._show()

    def _unscale(self, gradients: list[torch.Tensor]) -> None:
        found = torch.zeros(1, device=self._device)
        gradients = [torch.view_as_real(g) if g.is_complex() else g for g in gradients]
        if gradients:
            inverse = torch.full((1,), 1.0 / self.scaler.loss_scale, device=self._device)
            unscale_gradients(gradients, found, inverse)
        self.overflow = bool(largest(found))

    def prepare(self) -> None:
        """Copies the gradients here if that has not been done in this step."""
        if not self._taken:
            self.update()

    def all(self) -> list[Any]:
        """Returns what has the unscaled gradients."""
        return [row.main for row in self._rows]

    def of(self, parameters: Iterable[Any]) -> list[Any]:
        """Returns what has the unscaled gradients of parameters; for a main parameter, itself.

        Parameters that the optimizer does not have, or that live elsewhere, have none.
        """
        found = {id(row.parameter): row.main for row in self._rows}
        found.update((id(row.main), row.main) for row in self._rows)
        return [found[id(one)] for one in parameters if id(one) in found]

    def step(self, inner: Callable[[], Any]) -> Any:
        """Steps the optimizer and copies its results to the parameters; not after an overflow.

        Args:
            inner: does the optimizer's own step.

        Returns:
            What `inner` returns; None after an overflow.
        """
        if not self.half:
            return inner()
        self.prepare()
        self._taken = False
        before = self.scaler.loss_scale
        self.scaler.update_scale(self.overflow)
        self._show()
        if self.overflow:
            if state.topology.rank == 0:
                now = self.scaler.loss_scale
                log.info("smp: overflow at loss scale %g, step left out; it is %g now", before, now)
            return None
        result = inner()
        with torch.no_grad():
            for row, main in self._copies():
                row.local.copy_(main)
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of parameters and main parameters."""
        self._taken = False
        for row in self._rows:
            row.main.grad = None
            if row.local.grad is not None:
                row.local.grad = None if set_to_none else torch.zeros_like(row.local.grad)

    def _copies(self) -> list[tuple[_Row, nn.Parameter]]:
        """Returns the main parameters of another dtype on this rank, and their rows."""
        return [
            (row, row.main)
            for row in self._rows
            if row.local.dtype in HALF and isinstance(row.main, nn.Parameter)
        ]

    def entries(self, indices: Mapping[int, int]) -> dict[int, ShardedParameter]:
        """Returns the sharded parameters by number.

        Args:
            indices: the number of each of the model's parameters, by its id.
        """
        return {indices[id(row.parameter)]: row.entry for row in self._rows if row.entry}

    def tensors(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Returns the main parameters with memory of their own, and the gradients of all."""
        gradients = [row.main.grad for row in self._rows]
        mains: list[torch.Tensor] = [main for _, main in self._copies()]
        return mains, [gradient for gradient in gradients if gradient is not None]

    # --- states -----------------------------------------------------------------------------------

    def state_dict(self, indices: Mapping[int, int]) -> dict[str, Any]:
        """Returns the main parameters of half-precision parameters, by number, and the loss scale.

        Args:
            indices: the number of each of the model's parameters, by its id.
        """
        mains = {indices[id(row.parameter)]: m.detach() for row, m in self._copies()}
        return {"masters": mains, "loss_scaler": self.scaler.state_dict()}

    def load_state_dict(self, given: Mapping[str, Any], indices: Mapping[int, int]) -> None:
        """Loads the main parameters that belong here.

        Args:
            given: what `state_dict` has returned, merged over all ranks that share the model.
            indices: as for `state_dict`.
        """
        with torch.no_grad():
            for row in self._rows:
                value = given["masters"].get(indices[id(row.parameter)])
                if value is not None and row.local.dtype in HALF:
                    value = value if row.entry is None else row.entry.cut(value)
                    row.local.copy_(value)
                    if isinstance(row.main, nn.Parameter):
                        row.main.copy_(value)
        self.scaler.load_state_dict(given["loss_scaler"])
        self._show()

    def _show(self) -> None:
        """Sets the attributes that scripts read: `overflow` and `loss_scale`, as in Apex."""
        optimizer: Any = self._optimizer()
        optimizer.overflow, optimizer.loss_scale = self.overflow, self.scaler.loss_scale


def _in_dtype_of(main: nn.Parameter, parameter: nn.Parameter, own: Any) -> Any:
    """Returns what an optimizer has made at once, as Adagrad does, for a main parameter."""
    return map_tensors(lambda t: t.to(main.dtype) if t.dtype == parameter.dtype else t, own)
