"""`smp.DistributedOptimizer`: an optimizer for parameters that live on different ranks."""

from __future__ import annotations

import functools
import itertools
import types
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from smddp._torch_internals import tree_map
from smddp.modelparallel.core.errors import SMPInitializationError, SMPUsageError
from smddp.modelparallel.core.logs import warn_user
from smddp.modelparallel.torch.common.structure import tensors_in
from smddp.modelparallel.torch.delayed.life import come_to_life, with_values
from smddp.modelparallel.torch.job.meeting import gathered, gathered_over, together
from smddp.modelparallel.torch.job.state import state
from smddp.modelparallel.torch.optimizer import watch
from smddp.modelparallel.torch.optimizer.clipping import clip_grad_norm
from smddp.modelparallel.torch.optimizer.half import half_precision
from smddp.modelparallel.torch.optimizer.loss_scale import make_scaler
from smddp.modelparallel.torch.optimizer.main_parameters import MainParameters
from smddp.modelparallel.torch.optimizer.shards import SHARD, Shards, check_complete
from smddp.modelparallel.torch.partition.placement import MARKER, Placement
from smddp.modelparallel.torch.sharding.joined import SHARDS, form_of, united
from smddp.modelparallel.torch.sharding.sharding import Sharding
from smddp.modelparallel.torch.tensor import division

__all__ = ["FP16_STATES", "DistributedOptimizer", "merged"]

# Key of a state dict: the main parameters, by number of the parameter, and the loss scale.
FP16_STATES = "fp16_states"


class _IsPatched(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return hasattr(instance, "_smp_state")


class DistributedOptimizer(metaclass=_IsPatched):
    """Adds methods to an optimizer and returns it; it stays the same object.

    Parameters that live on other ranks have no gradient here, so the optimizer skips them.
    What changes is its state dict: `state_dict` gathers it from all ranks of the pipeline, and
    `load_state_dict` keeps what belongs to this rank. A script may create the optimizer before or
    after it wraps the model. All parameters that require gradients have to be the model's. A model
    may have several optimizers; with fp16 or bf16 only the last one that was made can step, because
    there is one loss scale.

    With `shard_optimizer_state` in the configuration the state is divided over the replicas of each
    partition, and `step` sends the new parameters to all of them. It must be an optimizer that
    steps each parameter by itself, as those of torch.optim do, except LBFGS. All replicas have to
    call `step` equally often, and `model.join()` is refused. The results are the same as without.

    An optimizer that combines values of several parameters, as D-Adaptation or Prodigy do, would
    train differently from one process. The first step with gradients is watched: a warning names
    the optimizer and the line. It does not see what code computes with NumPy.

    Args:
        optimizer: any object with `param_groups` and `state`, whose class has `step`, `state_dict`
            and `load_state_dict`.
        static_loss_scale: with fp16 or bf16 in the configuration, the factor for losses.
        dynamic_loss_scale: with fp16 or bf16, use a factor that adapts to overflows instead. It
            begins at 2^32 and halves with each overflow, so the first 15 steps or so change
            nothing.
        dynamic_loss_args: the arguments of DynamicLossScaler, by name, or all of them in one dict
            with this name. `{"init_scale": 2.0**16}` begins lower.

    Raises:
        SMPInitializationError: `smp.init` has not been called.
        SMPUsageError: it is no optimizer, or is one of smp already, a parameter of it does not
            belong to the model, dynamic_loss_args are wrong, or it needs whole parameters, as
            Adafactor, LBFGS and Muon do, and ranks have parts of them.
    """

    def __new__(
        cls,
        optimizer: Any,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        **dynamic_loss_args: Any,
    ) -> Any:
        """Returns `optimizer` itself."""
        if not state.initialized:
            raise SMPInitializationError("call smp.init() before smp.DistributedOptimizer")
        if not hasattr(optimizer, "param_groups"):
            raise SMPUsageError(
                "smp.DistributedOptimizer takes an optimizer such as torch.optim.AdamW, not "
                f"{type(optimizer).__name__}"
            )
        if hasattr(optimizer, "_smp_state"):
            raise SMPUsageError("the optimizer is a smp.DistributedOptimizer already")
        scaler = make_scaler(static_loss_scale, dynamic_loss_scale, dynamic_loss_args)
        half, sharded = half_precision() is not None, state.groups.sharding is not None
        if sharded or state.topology.tp_size > 1:
            _refuse_by_class(optimizer, sharded)
        main = None
        if half or sharded:
            used = scaler if half else make_scaler(1.0, False, {})
            main = MainParameters(optimizer, used, half)
        if not half and (dynamic_loss_scale or scaler.loss_scale != 1) and state.topology.rank == 0:
            warn_user(
                "smp.DistributedOptimizer scales losses only with fp16: True in the configuration; "
                "with torch.autocast, use smp.amp.GradScaler"
            )
        helper = _State(optimizer, main)
        model = state.current_model()
        if model is not None:
            helper.check(model)
        optimizer._smp_state = helper
        for name in ("step", "state_dict", "load_state_dict"):
            setattr(optimizer, name, types.MethodType(getattr(_patches, name), optimizer))
        for name in ("local_state_dict", "orig_state_dict", "_param_id_to_index"):
            setattr(optimizer, name, types.MethodType(getattr(_patches, name), optimizer))
        if helper.counted is not None:
            step = functools.partial(_patches.step, optimizer)
            optimizer.step = functools.update_wrapper(step, helper.counted)
        if hasattr(optimizer, "zero_grad"):
            optimizer.zero_grad = types.MethodType(_patches.zero_grad, optimizer)
        if sharded:
            # Scripts log it after each batch, also of those before the first step.
            optimizer._global_grad_norm = 0.0
        if main is not None:
            if hasattr(optimizer, "add_param_group"):
                add = types.MethodType(_patches.add_param_group, optimizer)
                optimizer.add_param_group = add
            if half:
                _add_names_of_fp16(optimizer, main)
        state.optimizers.append(weakref.ref(optimizer))
        if model is not None and model.partitioned:
            helper.adopt(model.runtime.placement, model.runtime.sharding)
        return optimizer


def _ranks_differ() -> bool:
    """Says whether the parameters of a model, or parts of them, are on several ranks."""
    divided = state.topology.size_of("mp") > 1 or state.groups.sharding is not None
    return divided or state.cfg.shard_optimizer_state


_REPLACED = (
    ". With tensor parallelism, smp.DistributedModel replaces parameters: create the optimizer "
    "after it"
)
# Optimizers that need whole parameters, or the norm of all of them; by the names of their classes.
_OF_WHOLE_PARAMETERS = ("Adafactor", "LBFGS", "Muon")
# These work on parameters that only tensor parallelism would divide, which are not sparse then.
_OF_WHOLE_SHARDS = (*_OF_WHOLE_PARAMETERS, "SparseAdam")


def _refuse_by_class(optimizer: Any, sharded: bool) -> None:
    for kind in type(optimizer).__mro__:
        if kind.__name__ in (_OF_WHOLE_SHARDS if sharded else _OF_WHOLE_PARAMETERS):
            raise SMPUsageError(
                f"{kind.__name__} needs whole parameters, and with tensor_parallel_degree or "
                "sharded_data_parallel_degree an optimizer has only a part of them: use one that "
                "updates each element on its own, such as AdamW, or smp.optimizers.FusedLAMB"
            )


def _add_names_of_fp16(optimizer: Any, main: MainParameters) -> None:
    """Adds the attributes that scripts for fp16 use; the names are those of NVIDIA Apex."""
    # In Apex this is the wrapped optimizer; scripts pass it to learning rate schedules.
    optimizer.optimizer = optimizer
    optimizer.loss_scaler = main.scaler
    optimizer.loss_scale, optimizer.overflow = main.scaler.loss_scale, False
    optimizer.fp32_from_fp16_groups = []
    optimizer.clip_master_grads = clip_grad_norm
    optimizer.update_master_grads = types.MethodType(_patches.update_master_grads, optimizer)
    optimizer.backward = types.MethodType(_patches.backward, optimizer)


class _patches:  # noqa: N801  a namespace of functions that become methods of the optimizer
    """The methods, with the names and signatures of the original library."""

    @staticmethod
    def step(self: Any, closure: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Does the optimizer's own step, for the parameters that live on this rank.

        With shard_optimizer_state all replicas have to call it.

        Returns:
            What the optimizer's own step returns; None after an overflow with fp16.

        Raises:
            SMPUsageError: a step of smp runs, or the optimizer has a parameter that does not belong
                to the model; with fp16 or bf16 also if a closure is given, or there is a later
                optimizer.
            SMPPeerError: with shard_optimizer_state, the step has failed on another replica; with
                that, sharded data parallelism, fp16 or `FusedLAMB`, a rank is gone, or has not
                called this in time.
        """
        if state.in_step:
            raise SMPUsageError(
                "optimizer.step() has to be outside the function decorated with smp.step: only "
                "there the gradients of all microbatches are complete"
            )
        model, main = state.current_model(), self._smp_state.main
        half = main is not None and main.half
        if half and self is not state.current_optimizer():
            raise SMPUsageError(
                "with fp16 or bf16 only the last smp.DistributedOptimizer has master weights, and "
                "a later one was made: give all parameters to one optimizer, in several groups"
            )
        if model is not None:
            self._smp_state.check(model)
        if state.groups.sharding is not None:
            self._global_grad_norm = clip_grad_norm(state.cfg.sdp_gradient_clipping)
        if closure is not None and half:
            raise SMPUsageError("with fp16 or bf16, optimizer.step() takes no closure")
        arguments = (closure, *args) if closure is not None or args else ()
        return self._smp_state.step(*arguments, **kwargs)

    @staticmethod
    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
        """Clears the gradients on this rank, those of main parameters, too.

        Raises:
            SMPUsageError: the body of a step calls it. There gradients from before the step have
                been put aside, and would be added to those of the step.
        """
        state.refuse_in_step(
            "optimizer.zero_grad()", "gradients of earlier steps are added when the step ends"
        )
        main = self._smp_state.main
        if main is not None and main.half:
            main.zero_grad(*args, **kwargs)
        else:
            self._smp_state.clear(*args, **kwargs)

    @staticmethod
    def update_master_grads(self: Any) -> None:
        """Copies the gradients to the main parameters; see `MainParameters.update`.

        Raises:
            SMPUsageError: the body of a step calls it.
        """
        state.refuse_in_step("optimizer.update_master_grads()")
        self._smp_state.main.update()

    @staticmethod
    def state_dict(self: Any) -> Any:
        """Returns the state of all parameters; all ranks of the pipeline have to call it.

        With sharded data parallelism all ranks of the sharding group do, too.

        Raises:
            SMPUsageError: shard_optimizer_state is set, or the body of a step calls it.
            SMPPeerError: a rank has not called it within the timeout of the process group.
        """
        state.refuse_alone_in_step("optimizer.state_dict()")
        return self._smp_state.full()

    @staticmethod
    def local_state_dict(self: Any, gather_if_shard: bool = True) -> Any:
        """Returns the state of the parameters that live here, with the key `_smp_is_partial`.

        With shard_optimizer_state and `gather_if_shard`, the first replica of each partition gets
        a list of the states of all replicas as "state", and all replicas have to call this;
        otherwise each gets what it has itself.

        Raises:
            SMPPeerError: the states are gathered, and a replica has not called this in time.
        """
        return self._smp_state.local(gather_if_shard)

    @staticmethod
    def orig_state_dict(self: Any) -> Any:
        """Returns what the optimizer's own `state_dict` returns on this rank."""
        return self._smp_state.state_dict()

    @staticmethod
    def load_state_dict(self: Any, state_dict: Mapping[str, Any]) -> None:
        """Loads what `state_dict` or `local_state_dict` has returned.

        All ranks of the pipeline have to call it with a local one, and all replicas if it is from
        a job with shard_optimizer_state. With several partitions, before the first step, it only
        keeps the state, and loads it once it is known which parameters live here.

        Raises:
            SMPPeerError: a local one is loaded, and a rank has not called this in time.
            SMPUsageError: parts of a state that was divided over replicas are missing, or the body
                of a step calls it.
        """
        state.refuse_alone_in_step("optimizer.load_state_dict()")
        self._smp_state.load(state_dict)

    @staticmethod
    def add_param_group(self: Any, param_group: dict[str, Any]) -> None:
        """Adds a group as the optimizer's own method does, and puts main parameters into it.

        Raises:
            ValueError: another group has one of its parameters.
        """
        present = set(self._smp_state.indices())
        type(self).add_param_group(self, param_group)
        # The optimizer's own check sees main parameters, not those of the model.
        if any(id(parameter) in present for parameter in self.param_groups[-1]["params"]):
            del self.param_groups[-1]
            raise ValueError("some parameters appear in more than one parameter group")
        model = state.current_model()
        if model is not None and model.partitioned:
            self._smp_state.adopt(model.runtime.placement, model.runtime.sharding)

    @staticmethod
    def backward(self: Any, loss: torch.Tensor, update_master_grads: bool = True) -> None:
        """Does what `smp.DistributedModel.backward` does, for a loss.

        With `update_master_grads` it also copies the gradients to the main parameters as soon as
        they are complete: in a step, at its end, before the hooks of `register_post_step_hook`.
        Otherwise the script calls `optimizer.update_master_grads`, or `clip_master_grads` or `step`
        does that.

        Raises:
            SMPUsageError: as for `smp.DistributedModel.backward`.
        """
        model = state.current_model()
        model.backward(loss)
        if not update_master_grads:
            return
        if state.in_step:
            model.runtime.updates_masters = True
        else:
            self.update_master_grads()

    @staticmethod
    def _param_id_to_index(self: Any) -> Any:
        """Returns the number of each parameter in the state dict, by its id."""
        return self._smp_state.indices()


class _State:
    """Gathers and loads the state of one optimizer.

    Attributes:
        main: what the optimizer has in place of parameters; None if it has them.
        counted: the wrapper that a learning rate schedule has put around `step`; None without one.
        shards: which replica steps which parameter; None if each steps all of them.
    """

    def __init__(self, optimizer: Any, main: MainParameters | None) -> None:
        self.main = main
        self.shards = _shards(optimizer)
        self._watched = False
        self._optimizer = weakref.ref(optimizer)
        # The functions of the class: bound methods would keep the optimizer alive.
        kind = type(optimizer)
        self._step, self._state_dict, self._load = kind.step, kind.state_dict, kind.load_state_dict
        self._clear = vars(optimizer).get("zero_grad")
        # A learning rate schedule wraps `step` to count calls, and later looks for its wrapper.
        self.counted = counted = vars(optimizer).get("step")
        if counted is not None:
            self._step = lambda _, *args, **kwargs: counted(*args, **kwargs)
        self._deferred: Mapping[str, Any] | None = None
        # The model, and the parameters of the optimizer that `check` has found in it. A script may
        # put main parameters of its own in their place afterwards.
        self._checked: tuple[weakref.ref[Any], list[Any]] | None = None

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Does the optimizer's own step, on what it has in place of parameters."""
        shards = self.shards
        if shards is None:
            return self._step_whole(*args, **kwargs)
        model = state.current_model()
        if model is not None and model.partitioned:
            self._assign(model.runtime.placement)
        groups = self._groups()
        closure = args[0] if args else None
        if closure is not None:

            def complete() -> Any:
                with shards.whole(groups):
                    return closure()

            args = (complete, *args[1:])
        result, failure = None, None
        try:
            with shards.only_own(groups):
                result = self._step_whole(*args, **kwargs)
        except Exception as error:
            failure = error
        shards.exchange(failure)
        return result

    def clear(self, *args: Any, **kwargs: Any) -> None:
        """Does what the optimizer's own `zero_grad` does."""
        if self._clear is not None:
            self._clear(*args, **kwargs)
        else:
            optimizer: Any = self._optimizer()
            type(optimizer).zero_grad(optimizer, *args, **kwargs)

    def _step_whole(self, *args: Any, **kwargs: Any) -> Any:
        watched = not self._watched and _ranks_differ()
        if watched and args and callable(args[0]):
            args = (watch.unwatched(args[0]), *args[1:])
        inner = functools.partial(self._step, self._optimizer(), *args, **kwargs)
        if watched:
            inner = functools.partial(self._step_watched, inner)
        return inner() if self.main is None else self.main.step(inner)

    def _step_watched(self, inner: Any) -> Any:
        """Does the first step with gradients, and warns if it reduces over parameters."""
        parameters = [one for group in self._groups() for one in group["params"]]
        self._watched = any(one.grad is not None for one in parameters)
        if not self._watched:
            return inner()
        with watch.Watch(parameters) as watched:
            result = inner()
        optimizer: Any = self._optimizer()
        watched.forget(optimizer)
        if watched.found:
            warn_user(
                f"the step of {type(optimizer).__name__} combines values of several parameters "
                f"({watched.found}). Each rank has only some parameters of the model, so it may "
                "train differently from one process. Use an optimizer that steps each parameter by "
                "itself; for a norm of all gradients, call smp.clip_grad_norm, or "
                "torch.nn.utils.get_total_norm with the gradients, on all ranks"
            )
        return result

    def optimised(self) -> list[Any]:
        """Returns what has the gradients, also of parameters that other replicas step."""
        groups, main = self._groups(), self.main
        if self.shards is None:
            parameters = [parameter for group in groups for parameter in group["params"]]
        else:
            parameters = self.shards.all_parameters(groups)
        return parameters if main is None else [main.with_gradient(p) for p in parameters]

    def tensors(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Returns what the optimizer keeps, main parameters too, and the gradients of those."""
        own = tensors_in(list(getattr(self._optimizer(), "state", {}).values()))
        masters, gradients = ([], []) if self.main is None else self.main.tensors()
        return [*own, *masters], gradients

    def original(self, parameter: Any) -> Any:
        """Returns the model's parameter for one of the optimizer."""
        return parameter if self.main is None else self.main.original(parameter)

    def check(self, model: Any, placement: Placement | None = None) -> None:
        """Raises SMPUsageError if a parameter that requires gradients is not the model's.

        Args:
            model: the smp.DistributedModel.
            placement: of the model; None if that has one already.
        """
        originals, checked = self._originals(), self._checked
        if checked is not None and checked[0]() is model and len(checked[1]) == len(originals):
            return
        known = (placement or model.runtime.placement).known()
        for parameter in originals:
            if parameter.requires_grad and id(parameter) not in known:
                raise SMPUsageError(
                    f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is "
                    "no parameter of the smp.DistributedModel, or was put into it later: smp would "
                    "neither reduce its gradient nor save its state. Change the model before "
                    "smp.DistributedModel. Give parameters of others to an optimizer of their own, "
                    "without smp.DistributedOptimizer"
                    + (_REPLACED if state.topology.tp_size > 1 else "")
                )
        self._checked = weakref.ref(model), originals

    def state_dict(self) -> dict[str, Any]:
        """Returns what the optimizer's own `state_dict` returns on this rank."""
        own: dict[str, Any] = self._state_dict(self._optimizer())
        return own

    def indices(self) -> dict[int, int]:
        """Returns the number of each of the model's parameters in the state dict, by its id."""
        numbers: dict[int, int] = {}
        for parameter in self._originals():
            numbers.setdefault(id(parameter), len(numbers))
        return numbers

    def local(self, gather: bool = False) -> dict[str, Any]:
        """Returns the state of the parameters that live here, with `MARKER`.

        Args:
            gather: if the state is divided over replicas, give the first one a list of all parts.
        """
        own = dict(self.state_dict())
        if "state" not in own:
            # An optimizer of the script, which keeps its state as it likes: it loads on this rank.
            return {**own, MARKER: True}
        mine = self._local_indices()
        own["state"] = {i: entry for i, entry in own["state"].items() if i in mine}
        if self.main is not None and self.main.half:
            own[FP16_STATES] = self.main.state_dict(self.indices())
        if self._deferred is not None:
            own.update(tree_map(with_values, self._parts(self._deferred, mine)))
        forms = {i: form for i, form in self._forms().items() if i in mine}
        if forms or state.groups.sharding is not None:
            own[SHARDS] = forms
        own[MARKER] = True
        if self.shards is not None:
            own[SHARD] = self.shards.rank, self.shards.size
            if gather:
                self._gather(own)
        return own

    def _gather(self, own: dict[str, Any]) -> None:
        """Makes lists of the parts of all replicas, on the first one, in a state dict."""
        assert self.shards is not None
        group, masters = self.shards.group, own.get(FP16_STATES, {}).get("masters")
        first = dist.get_global_rank(group, 0)
        parts: list[Any] | None = [None] * self.shards.size if self.shards.rank == 0 else None
        with together("optimizer.local_state_dict", group):
            dist.gather_object((own["state"], masters), parts, dst=first, group=group)
        if parts is not None:
            own["state"] = [part for part, _ in parts]
            if masters is not None:
                own[FP16_STATES]["masters"] = [part for _, part in parts]

    def full(self) -> dict[str, Any]:
        """Returns the state of all parameters; see `_patches.state_dict`."""
        if state.cfg.shard_optimizer_state:
            raise SMPUsageError(
                "with shard_optimizer_state there is no full state of the optimizer: use "
                "optimizer.local_state_dict() or smp.save_checkpoint(…, partial=True)"
            )
        return self._whole(self.local(), "state_dict of the optimizer")

    def load(self, given: Mapping[str, Any]) -> None:
        """Loads a full or partial state; see `_patches.load_state_dict`."""
        model = state.current_model()
        entries = dict(given)
        if given.get(MARKER) and "state" in given:
            call = "optimizer.load_state_dict with a partial state dict"
            if SHARD in given:
                given = _merged_over(state.groups.of("rdp"), given, call)
            entries = self._whole(given, call)
        entries.pop(MARKER, None)
        waits = self.main is not None and model is None
        if waits or (model is not None and not model.partitioned):
            self._deferred = entries
            if "state" in entries:
                # Scripts read and change the groups before the first step, and add some.
                self._load_some(entries, set())
            return
        self._load_some(entries, self._local_indices())

    def adopt(self, placement: Placement, sharding: Sharding | None) -> None:
        """Notes which parameters live here; loads what was given before that was known."""
        if self.shards is not None:
            self._assign(placement)
        self._place_first_state(placement)
        if self.main is not None:
            steps = (lambda _: True) if self.shards is None else self.shards.steps
            self.main.adopt(placement, sharding, steps)
        if self._deferred is not None:
            entries, self._deferred = dict(self._deferred), None
            if "param_groups" in entries:
                entries["param_groups"] = self.state_dict()["param_groups"]
            numbers = self.indices()
            owned = {id(p) for p in placement.parameters()}
            self._load_some(entries, {numbers[key] for key in owned & numbers.keys()})

    def _assign(self, placement: Placement) -> None:
        """Assigns the parameters that live here to replicas, those of new groups included."""
        assert self.shards is not None
        mine = [p for group in self._groups() for p in group["params"] if placement.owns(p)]
        self.shards.assign(mine, placement.device)

    def _place_first_state(self, placement: Placement) -> None:
        """Frees state of parameters that are stepped elsewhere, and moves the rest to the device.

        Some optimizers make their state at once, as Adagrad does.
        """
        states = getattr(self._optimizer(), "state", {})
        for parameter in list(states):
            if placement.lives_elsewhere(parameter) or not self._steps(parameter):
                del states[parameter]
        for tensor in tensors_in(list(states.values())):
            come_to_life(tensor)
        for parameter, entry in states.items():
            for key, value in entry.items() if isinstance(entry, dict) else ():
                # torch's optimizers keep the number of steps in memory of the host.
                if key != "step" and isinstance(value, torch.Tensor):
                    entry[key] = value.to(parameter.device)

    def _groups(self) -> list[dict[str, Any]]:
        optimizer = self._optimizer()
        assert optimizer is not None
        groups: list[dict[str, Any]] = optimizer.param_groups
        return groups

    def _entries(self) -> dict[int, Any]:
        """Returns the sharded parameters of the optimizer, by number."""
        return {} if self.main is None else self.main.entries(self.indices())

    def _forms(self) -> dict[int, dict[str, Any]]:
        """Returns the forms of the parameters of which this rank has a part, by number."""
        numbers, entries = self.indices(), self._entries()
        found = {}
        for parameter in self._originals():
            number = numbers[id(parameter)]
            how = division.division_of(parameter)
            form = form_of(parameter, entries.get(number), how, _place())
            if form is not None:
                found[number] = form
        return found

    def _divided(self) -> dict[int, tuple[Any, division.Division]]:
        """Returns the parameters that are divided over tensor-parallel ranks, by number."""
        numbers = self.indices()
        found = ((p, division.division_of(p)) for p in self._originals())
        return {numbers[id(p)]: (p, how) for p, how in found if how is not None}

    def _load_some(self, entries: Mapping[str, Any], mine: set[int]) -> None:
        if "state" not in entries:
            self._load(self._optimizer(), tree_map(with_values, entries))
            return
        if self.shards is not None:
            numbers = self.indices()
            originals = (p for p in self._originals() if not self._steps(p))
            mine = mine - {numbers[id(p)] for p in originals}
        parts = self._parts(entries, mine)
        for i, entry in self._entries().items():
            if i in parts["state"]:
                parts["state"][i] = entry.cut_state(parts["state"][i])
        half = parts.pop(FP16_STATES, None)
        rest = {name: value for name, value in entries.items() if name != FP16_STATES}
        self._load(self._optimizer(), tree_map(with_values, {**rest, **parts}))
        if self.main is not None and half is not None:
            self.main.load_state_dict(half, self.indices())

    def _parts(self, entries: Mapping[str, Any], mine: set[int]) -> dict[str, Any]:
        """Returns what this tensor-parallel rank has of a whole state: "state", `FP16_STATES`.

        Args:
            entries: the state.
            mine: the numbers of the parameters whose state to return.
        """
        found = {"state": {i: entry for i, entry in entries["state"].items() if i in mine}}
        masters: dict[int, Any] = {}
        if self.main is not None and self.main.half and FP16_STATES in entries:
            masters = dict(entries[FP16_STATES]["masters"])
            found[FP16_STATES] = {**entries[FP16_STATES], "masters": masters}
        for i, (parameter, how) in self._divided().items():
            if i in found["state"]:
                found["state"][i] = how.state_parts(found["state"][i], parameter.shape, *_place())
            if i in masters:
                masters[i] = how.part(masters[i], *_place())
        return found

    def _local_indices(self) -> set[int]:
        model = state.current_model()
        numbers = self.indices()
        if model is None or not model.partitioned:
            return set(numbers.values())
        return {numbers[id(p)] for p in model.local_parameters() if id(p) in numbers}

    def _originals(self) -> list[Any]:
        """Returns the model's parameters that the optimizer has."""
        found = [self.original(p) for group in self._groups() for p in group["params"]]
        model = state.current_model()
        if self._checked is None or model is None or self._checked[0]() is not model:
            return found
        checked = self._checked[1]
        known = set(map(id, checked))
        pairs = itertools.zip_longest(found, checked[: len(found)])
        return [old if old is not None and id(new) not in known else new for new, old in pairs]

    def _steps(self, parameter: Any) -> bool:
        return self.shards is None or self.shards.steps(parameter)

    def _whole(self, part: Mapping[str, Any], what: str) -> dict[str, Any]:
        """Returns the state of all ranks of the pipeline, from the part of each.

        Args:
            part: of this rank.
            what: the call that all of these ranks have to make; for error texts.
        """
        groups = []
        if state.groups.sharding is not None:
            groups.append(state.groups.sharding.parameters)
        if state.topology.size_of("mp") > 1:
            groups.append(state.groups.of("mp"))
        mine = {name: value for name, value in part.items() if name != MARKER}
        parts = gathered_over(what, mine, groups)
        return merged(parts) if len(parts) > 1 else parts[0]


def _place() -> tuple[int, int]:
    """Returns the rank in the tensor-parallel group, and its size."""
    return state.topology.rank_in("tp"), state.topology.tp_size


def _shards(optimizer: Any) -> Shards | None:
    """Returns what divides the state of an optimizer over replicas; None if nothing has to."""
    if not state.cfg.shard_optimizer_state or state.topology.size_of("rdp") == 1:
        return None
    if isinstance(optimizer, torch.optim.LBFGS):
        raise SMPUsageError(
            "shard_optimizer_state does not work with LBFGS, which steps all parameters together"
        )
    return Shards()


def _merged_over(group: dist.ProcessGroup, part: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Returns the state whose parts the replicas of this rank's partition have.

    Args:
        group: the replicas.
        part: of this rank; or the whole, as the first replica has saved it.
        what: the call that all of them have to make; for error texts.
    """
    parts = gathered(what, dict(part), group)
    whole = [one for one in parts if isinstance(one["state"], list)]
    if not whole:
        check_complete(parts)
    return {**merged(whole or parts), MARKER: True}


def merged(parts: Sequence[Mapping[str, Any]], lazily: bool = False) -> dict[str, Any]:
    """Returns one state dict made of those of the ranks of a pipeline, or of replicas.

    Args:
        parts: of the ranks.
        lazily: as for `united`.

    Raises:
        ValueError: a shard of a parameter's state is missing.
        SMPUsageError: the states have none by parameter, so they load only on the ranks that have
            saved them.
    """
    if any("state" not in part for part in parts):
        raise SMPUsageError(
            'the optimizer\'s state_dict() has no "state", so its parts cannot be joined: load it '
            "with as many partitions and ranks as have saved it"
        )
    forms = [part.get(SHARDS, {}) for part in parts]
    whole = {name: value for name, value in parts[0].items() if name not in (SHARD, SHARDS)}
    whole["state"] = _union([part["state"] for part in parts], forms, lazily)
    if FP16_STATES in whole:
        masters = _union([part[FP16_STATES]["masters"] for part in parts], forms, lazily)
        whole[FP16_STATES] = {**whole[FP16_STATES], "masters": masters}
    return whole


def _union(
    parts: Sequence[Any], forms: Sequence[Mapping[Any, Any]], lazily: bool
) -> dict[int, Any]:
    """Returns one dict made of several, or of lists of them, with whole tensors for shards."""
    single = [
        (one, form)
        for part, form in zip(parts, forms, strict=True)
        for one in (part if isinstance(part, list) else [part])
    ]
    whole = united([one for one, _ in single], [form for _, form in single], lazily)
    return dict(sorted(whole.items(), key=lambda item: item[0]))
