"""State dicts of a model whose parts live on different ranks."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from smddp._torch_internals import IncompatibleKeys
from smddp.modelparallel.core.errors import SMPUsageError
from smddp.modelparallel.torch.common.versions import versions_in, versions_of, with_versions
from smddp.modelparallel.torch.delayed.life import delayed, with_values
from smddp.modelparallel.torch.job.meeting import done_on_all, gathered_over, together
from smddp.modelparallel.torch.job.state import state
from smddp.modelparallel.torch.partition.placement import MARKER, Placement
from smddp.modelparallel.torch.pipeline.remote_tensor import give_values
from smddp.modelparallel.torch.sharding.joined import SHARDS, form_of, united, without_parts
from smddp.modelparallel.torch.sharding.sharding import Sharding
from smddp.modelparallel.torch.tensor.module import divisions_of

__all__ = ["ModelState"]

_LOADS_PARTIAL = "model.load_state_dict with a partial state dict"


class ModelState:
    """Makes and loads state dicts of a DistributedModel, with the model's original names."""

    def __init__(self, module: nn.Module, placement: Placement, sharding: Sharding | None) -> None:
        self._module = module
        self._placement = placement
        self._sharding = sharding
        # How parameters are divided over tensor-parallel ranks, by name.
        self._divisions = divisions_of(module)

    def full(self, only_rank_0: bool) -> dict[str, Any]:
        """Returns all entries; each value comes from the rank that owns it.

        All ranks of the pipeline have to call it; with sharded data parallelism, also those of the
        sharding group, and with tensor parallelism, all ranks of the model.

        Args:
            only_rank_0: of the job; the others get an empty dict.

        Raises:
            SMPPeerError: a rank has not called it within the timeout of the process group, or its
                sharding group has failed.
        """
        if self._placement.size > 1 and self._placement.divided:
            group = state.groups.of("pp")
            with together("state_dict", group):
                self._tell_forms(group)
                local = self._entries_of_all(group)
                for name, value in local.items():
                    local[name] = self._gathered(name, value, group)
        else:
            local = self._entries()
        self._unite(local)
        if only_rank_0 and state.topology.rank != 0:
            return {}
        return with_versions(local, versions_in(self._module))

    def _entries_of_all(self, group: dist.ProcessGroup) -> dict[str, Any]:
        """Returns `_entries`; raises on all ranks of the pipeline if that has raised on one."""
        local: dict[str, Any] = {}

        def collect() -> None:
            known = self._placement.known()
            for name, parameter in self._module.named_parameters():
                if id(parameter) not in known:
                    raise SMPUsageError(
                        f"parameter {name!r} was put into the model after it was divided, so other "
                        "ranks do not know it, and its gradient is not that of the other "
                        "parameters: make it in the module's constructor"
                    )
            local.update(self._entries())

        done_on_all("state_dict", collect, group)
        return local

    def _unite(self, entries: dict[str, Any]) -> None:
        """Replaces parts of parameters by whole ones; all tensor-parallel ranks have to call it."""
        names = [name for name in self._divisions if name in entries]
        if not names:
            return
        with together("state_dict", state.groups.of("tp")):
            for name in names:
                entries[name] = self._united(name, entries[name])

    def _united(self, name: str, part: torch.Tensor) -> torch.Tensor:
        part = part.detach().contiguous()
        parts = [torch.empty_like(part) for _ in range(state.topology.tp_size)]
        dist.all_gather(parts, part, group=state.groups.of("tp"))
        return self._divisions[name].united(parts)

    def _entries(self) -> dict[str, Any]:
        """Returns the module's own state dict, with the values of sharded parameters."""
        sharding = self._sharding
        if sharding is None or not self._placement.divided:
            own = self._module.state_dict()
            return {name: with_values(value) for name, value in own.items()}
        kept = self._module.state_dict(keep_vars=True)
        with together("state_dict", sharding.groups.parameters):
            return {name: _detached(value) for name, value in sharding.replace(kept).items()}

    def _tell_forms(self, group: dist.ProcessGroup) -> None:
        """Tells all ranks the forms of all buffers; after a failed step they may not know them."""
        told: list[Any] = [None] * self._placement.size
        dist.all_gather_object(told, self._placement.changed_forms()[0], group=group)
        for rank, forms in enumerate(told):
            self._placement.accept_forms(rank, forms)

    def _gathered(self, name: str, value: Any, group: dist.ProcessGroup) -> Any:
        owner = self._placement.owner_of_entry(name)
        source = dist.get_global_rank(group, owner)
        mine = owner == self._placement.rank
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            box = [value]
            dist.broadcast_object_list(box, source, group=group)
            return box[0]
        if mine:
            value = value.detach().contiguous()
        else:
            value = torch.empty(value.shape, dtype=value.dtype, device=self._placement.device)
        dist.broadcast(value, source, group=group)
        return value

    def local(self) -> dict[str, Any]:
        """Returns the entries that live here, with `MARKER`.

        With sharded data parallelism, the shards of parameters, and with `SHARDS` what they are;
        likewise the parts of those that are divided over tensor-parallel ranks.
        """
        entries: dict[str, Any] = {}
        forms: dict[str, Any] = {}
        for name, value in self._here().items():
            entry = None if self._sharding is None else self._sharding.entry(value)
            form = form_of(value, entry, self._divisions.get(name), _place())
            if form is not None:
                forms[name] = form
            entries[name] = _detached(with_values(value) if entry is None else entry.shard)
        entries = {**entries, **({SHARDS: forms} if forms else {}), MARKER: True}
        return with_versions(entries, versions_in(self._module))

    def shapes(self) -> dict[str, Any]:
        """Returns what `values` yields, with tensors that have no memory in place of parameters."""
        found: dict[str, Any] = {}
        for name, value in self._here().items():
            if isinstance(value, nn.Parameter):
                shape, division = value.shape, self._divisions.get(name)
                if division is not None:
                    shape = division.whole_shape(shape, _place()[1])
                value = torch.empty(shape, dtype=value.dtype, device="meta")
            found[name] = value
        return found

    def values(self) -> Iterator[Any]:
        """Yields the entries that live here, whole, each in memory only until the next one.

        All ranks of the sharding group, and all tensor-parallel ranks, have to take all of them.

        Raises:
            SMPPeerError: a rank has not called it within the timeout of the process group, or the
                group has failed.
        """
        with contextlib.ExitStack() as stack:
            if self._sharding is not None:
                stack.enter_context(together("state_dict", self._sharding.groups.parameters))
            if self._divisions:
                stack.enter_context(together("state_dict", state.groups.of("tp")))
            for name, value in self._here().items():
                entry = None if self._sharding is None else self._sharding.entry(value)
                if entry is None or self._sharding is None:
                    whole = _detached(with_values(value))
                else:
                    whole = self._sharding.whole(entry)
                if name in self._divisions:
                    whole = self._united(name, whole)
                yield whole
                del whole

    def _here(self) -> dict[str, Any]:
        """Returns the module's own entries, without those of modules that live elsewhere."""
        placement, entries = self._placement, self._module.state_dict(keep_vars=True)
        return {n: v for n, v in entries.items() if placement.owner_of_entry(n) == placement.rank}

    def load(self, given: Mapping[str, Any], strict: bool, same_partition: bool) -> Any:
        """Loads a full or partial state dict.

        Arguments, result and errors are those of `DistributedModel.load_state_dict`.
        """
        entries = {name: value for name, value in given.items() if name not in (MARKER, SHARDS)}
        if MARKER not in given:
            for _, to_own in state.module_manager.translate_functions:
                entries = to_own(entries)
        # Before the model is divided it is not known what lives here, so all parts are loaded.
        alone = bool(given.get(MARKER)) and same_partition and self._placement.divided
        if given.get(MARKER):
            entries = self._merged(entries, given.get(SHARDS, {}), alone)
        own = self._module.state_dict(keep_vars=True)
        names = list(own)
        # Some files hold a shared parameter under only one of its names.
        for same in self._shared():
            present = next((name for name in same if name in entries), None)
            if present is not None:
                entries = {**dict.fromkeys(same, entries[present]), **entries}
        here = [name for name in names if self._is_here(name)]
        expected = here if alone else names
        missing = [name for name in expected if name not in entries]
        unexpected = [name for name in entries if name not in names]
        if strict and (missing or unexpected):
            raise RuntimeError(
                f"the state does not fit the model: it lacks {_listed(missing)} of the model, and "
                f"has {_listed(unexpected)} that the model does not have"
            )
        local = {
            name: value for name, value in entries.items() if name not in names or name in here
        }
        divided = {} if alone else {name: local[name] for name in self._divisions if name in local}
        self._check_shapes(divided, own)
        for name in divided:
            local[name] = self._divisions[name].part(delayed(local[name]), *_place())
        self._module.load_state_dict(with_versions(local, versions_of(given)), strict=False)
        if self._divisions:
            del local
            gc.collect()  # delayed tensors have circles of references, and keep the given ones
        return IncompatibleKeys(missing, unexpected)

    def _check_shapes(self, wholes: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        """Raises RuntimeError if whole values do not fit the parts of them that the model has."""
        size, wrong = _place()[1], []
        for name, whole in wholes.items():
            expected = self._divisions[name].whole_shape(own[name].shape, size)
            if tuple(whole.shape) != tuple(expected):
                wrong.append(f"{name!r} has shape {[*whole.shape]}, and needs {[*expected]}")
        if wrong:
            raise RuntimeError(
                f"the state does not fit the model: {'; '.join(wrong)} (of the whole parameter, "
                f"which is divided over {size} tensor-parallel ranks)"
            )

    def _shared(self) -> list[list[str]]:
        """Returns the names of each parameter that has several."""
        names: dict[int, list[str]] = {}
        for name, parameter in self._module.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        return [same for same in names.values() if len(same) > 1]

    def _is_here(self, name: str) -> bool:
        placement = self._placement
        return not placement.divided or placement.owner_of_entry(name) == placement.rank

    def _merged(
        self, entries: dict[str, Any], forms: dict[str, Any], alone: bool
    ) -> dict[str, Any]:
        """Returns the whole entries of all ranks of the model.

        Args:
            entries: a partial state dict.
            forms: of its entries that are parts.
            alone: only those of this rank, with what it has of parameters that are divided over
                tensor-parallel ranks.
        """
        if alone:
            shards = {name: without_parts(form) for name, form in forms.items()}
            forms = {name: form for name, form in shards.items() if form is not None}
        groups = []
        if self._sharding is not None:
            groups.append(self._sharding.groups.parameters)
        elif any(without_parts(form) is not None for form in forms.values()):
            raise SMPUsageError(
                "the partial state dict is one of sharded data parallelism: load it with "
                "smp.resume_from_checkpoint, or in a job with the same sharded_data_parallel_degree"
            )
        if not alone and (self._placement.size > 1 or self._divisions):
            groups.append(state.groups.of("mp" if self._divisions else "pp"))
        parts = gathered_over(_LOADS_PARTIAL, (entries, forms), groups)
        return united([part for part, _ in parts], [form for _, form in parts])

    def gather_in_place(self) -> None:
        """Gives every rank all parameters and buffers, in memory of the host.

        Of a parameter that is divided over tensor-parallel ranks, every rank keeps its part.
        """
        group = state.groups.of("pp")
        with together("model.cpu", group):
            self._tell_forms(group)
            tensors: dict[str, torch.Tensor] = dict(self._module.named_parameters())
            # A buffer may be shared on some ranks only, because `to` and the like make it two.
            tensors.update(self._module.named_buffers(remove_duplicate=False))
            for name, tensor in tensors.items():
                give_values(tensor, self._gathered(name, tensor, group).cpu())
        self._placement.gathered = True


def _place() -> tuple[int, int]:
    """Returns the rank in the tensor-parallel group, and its size."""
    return state.topology.rank_in("tp"), state.topology.tp_size


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _listed(names: list[str]) -> str:
    """Returns a few names, and how many there are."""
    shown = ", ".join(map(repr, names[:5])) + (", …" if len(names) > 5 else "")
    many = f"{len(names)} entr{'y' if len(names) == 1 else 'ies'}"
    return f"{many} ({shown})" if names else "no entry"
