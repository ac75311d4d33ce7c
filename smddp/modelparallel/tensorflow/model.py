"""`smp.DistributedModel`: a model of Keras whose layers live on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from smddp.modelparallel.core.errors import SMPPartitionError, SMPUsageError
from smddp.modelparallel.tensorflow import job, layers
from smddp.modelparallel.tensorflow.division import (
    Division,
    Model,
    check_members,
    check_reads,
    decide,
    report,
)
from smddp.modelparallel.tensorflow.trace import Trace, handle_of
from smddp.modelparallel.tensorflow.values import as_tensor

__all__ = [
    "DistributedModel",
    "current",
    "divide",
    "is_current",
    "plan",
    "register_post_partition_hook",
]

_hooks: list[Callable[[], Any]] = []
_models: list[DistributedModel] = []


def register_post_partition_hook(hook: Callable[[], Any]) -> Callable[[], Any]:
    """Runs a function without arguments once, when the model has been divided; a decorator.

    That is in the first call of a step, before its microbatches run; at once if it has been. If a
    function raises an error, that call fails on all ranks; the model stays divided, and no function
    runs again.
    """
    if _models and _models[-1]._divided is not None:
        hook()
    else:
        _hooks.append(hook)
    return hook


class _Divided:
    """A model after the division; see `executor.Divided`."""

    def __init__(self, model: Model, division: Division) -> None:
        rank = job.pp_rank()
        self.model, self.division = model, division
        self.layers, self.owners, self.names = model.layers, division.owners, model.names
        self.numbers = model.numbers
        # By the id of the variable of TensorFlow; the same variable may be in several layers.
        self.owner_of: dict[int, int] = {}
        for number, own in enumerate(model.own):
            for weight in own:
                owner = self.owners[number]
                self.owner_of.setdefault(id(as_tensor(weight)), 0 if owner is None else owner)
        root = model.layers[0]
        self.weights = list(root.weights)
        self.trainable = list(root.trainable_variables)
        self.variables = {id(as_tensor(one)): i for i, one in enumerate(self.trainable)}
        self.mine = {number for key, number in self.variables.items() if self.owner_of[key] == rank}

    @property
    def handles(self) -> set[int]:
        """Those of now: `_free` replaces handles, and another one may get the id of an old one."""
        return {handle_of(weight) for weight in self.weights}

    def numbers_of(self, variables: Iterable[Any]) -> list[int]:
        """Returns the numbers of trainable variables.

        Raises:
            SMPUsageError: one is none of the model, or was not trainable.
        """
        numbers = []
        for variable in variables:
            key = id(as_tensor(variable))
            if key not in self.variables:
                why = "it is no trainable variable of the smp.DistributedModel"
                if key in self.owner_of:
                    why = (
                        "it was not trainable when the model was divided. Make layers trainable "
                        "before the first call of a step; later, in a new model after "
                        "smp.shutdown() and smp.init()"
                    )
                raise SMPUsageError(f"optimizer.get_gradients: variable {variable.name!r}: {why}")
            numbers.append(self.variables[key])
        return numbers

    def is_mine(self, variable: Any) -> bool:
        return self.owner_of.get(id(as_tensor(variable)), job.pp_rank()) == job.pp_rank()

    def foreign(self) -> Iterator[tuple[int, Any]]:
        """Yields number and variable of TensorFlow of each weight that another rank owns."""
        for number, weight in enumerate(self.weights):
            if not self.is_mine(weight):
                yield number, as_tensor(weight)


class DistributedModel(tf.keras.Model):  # type: ignore[misc]
    """A model of Keras whose layers are divided over the ranks of a pipeline; subclass it.

    The first call of a function under `smp.step` divides it. Afterwards `variables`, `weights` and
    their like are those of this rank outside of steps, and those of all ranks inside.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        job.cfg()  # raises before smp.init
        object.__setattr__(self, "_divided", None)
        if not _models:
            job.at_shutdown(_models.clear)
        _models.append(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model, inside a function under `smp.step`.

        Raises:
            SMPUsageError: outside of one, if there are several partitions.
        """
        if self._divided is not None and layers.current() is None and job.pp_size() > 1:
            raise SMPUsageError(
                "the model is divided over several ranks: call it inside a function under smp.step"
            )
        return super().__call__(*args, **kwargs)

    def fit(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuses: each rank would train a whole model of its own.

        Raises:
            SMPUsageError: always.
        """
        raise SMPUsageError(
            "model.fit and model.train_on_batch cannot train an smp.DistributedModel: write the "
            "loop, and call a function under smp.step in it"
        )

    train_on_batch = fit

    def _here(self, variables: Any) -> Any:
        divided = self.__dict__.get("_divided")
        if divided is None or layers.current() is not None:
            return variables
        return [variable for variable in variables if divided.is_mine(variable)]

    @property
    def variables(self) -> Any:
        """This rank's variables."""
        return self._here(super().variables)

    @property
    def trainable_variables(self) -> Any:
        """This rank's trainable variables; all of the model's inside a step."""
        return self._here(super().trainable_variables)

    @property
    def non_trainable_variables(self) -> Any:
        """This rank's other variables."""
        return self._here(super().non_trainable_variables)

    @property
    def weights(self) -> Any:
        """This rank's weights."""
        return self._here(super().weights)

    @property
    def trainable_weights(self) -> Any:
        """This rank's trainable weights."""
        return self._here(super().trainable_weights)

    @property
    def non_trainable_weights(self) -> Any:
        """This rank's other weights."""
        return self._here(super().non_trainable_weights)

    def save_model(self, save_path: str = "/opt/ml/model") -> None:
        """Saves the whole model as a SavedModel, which needs no smp; all ranks call it.

        Rank 0 of the job needs memory for all weights meanwhile.

        Args:
            save_path: a folder.

        Raises:
            SMPUsageError: the model has not been divided, so it has not been called.
            SMPPeerError: another rank has failed; on that, its own error.
        """
        divided = self._divided
        if divided is None:
            raise SMPUsageError("save_model: the model has not been called in a step yet")
        group, rank = job.group("pp"), job.pp_rank()
        try:
            for number, weight in enumerate(divided.weights):
                variable = as_tensor(weight)
                owner = divided.owner_of[id(variable)]
                sends, receives = rank == owner and job.dp_rank() == 0, job.rank() == 0
                if owner == 0:
                    continue
                # All ranks agree twice: a rank that cannot send or receive must not begin.
                with job.together("save_model"):
                    if sends:
                        value = np.asarray(variable.numpy())
                    elif receives:
                        value = np.empty(variable.shape, variable.dtype.as_numpy_dtype)
                with job.together("save_model"):
                    if sends:
                        group.send(value, 0, tag=number)
                    elif receives:
                        variable.assign(group.receive(value, owner, tag=number))
            with job.together("save_model"), layers.intercepted(_Local()):
                if job.rank() == 0:
                    if hasattr(self, "export"):
                        self.export(save_path)
                    else:
                        self.save(save_path, save_format="tf")
        finally:
            for _, variable in divided.foreign():
                tf.raw_ops.DestroyResourceOp(resource=variable.handle)


class _Local:
    """Runs every call here."""

    def called(
        self, layer: Any, original: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        return original(*args, **kwargs)


def current() -> DistributedModel:
    """Returns the script's model.

    Raises:
        SMPUsageError: there is none.
    """
    if not _models:
        raise SMPUsageError(
            "smp.step needs an smp.DistributedModel: the script has made none since smp.init()"
        )
    if len(_models) > 1:
        raise SMPUsageError(
            f"a script has one smp.DistributedModel, and this has {len(_models)}: make one of them "
            "a layer of the other, as a tf.keras.Model"
        )
    return _models[0]


def is_current(divided: _Divided) -> bool:
    """Returns whether a model was divided since `smp.init`."""
    return any(model._divided is divided for model in _models)


def plan(model: DistributedModel, found: Trace) -> _Divided:
    """Decides where the layers live, by a trace; or checks that a trace fits the division there is.

    Raises:
        SMPPartitionError: the model cannot be divided as asked, or code uses weights of other
            ranks.
    """
    divided: _Divided | None = model._divided
    outline = Model(model) if divided is None else divided.model
    check_members(outline, found)
    if divided is not None:
        check_reads(outline, divided.division, found)
        return divided
    for layer in outline.layers:
        if job.rdp_size() > 1 and getattr(layer, "synchronized", False):
            raise SMPPartitionError(
                f"layer {layer.name!r} is synchronized, but smp normalizes each microbatch of a "
                "replica by itself: leave out synchronized=True"
            )
    planned = _Divided(outline, decide(job.cfg(), outline, found))
    if job.rank() == 0:
        report(planned.division, outline, job.pp_size())
    return planned


def divide(model: DistributedModel, planned: _Divided) -> None:
    """Divides a model; all ranks of the job call it.

    Weights of other ranks lose their memory. The ranks of all replicas get the weights of the
    first.

    Raises:
        SMPPartitionError: the model is not the same on all ranks.
        SMPPeerError: on another rank a function of `register_post_partition_hook` has failed, or it
            is gone; on that, its own error.
    """
    if model._divided is planned:
        return
    outline = planned.model.outline(), planned.owners
    for rank, answer in enumerate(job.exchange("world", outline)):
        if answer != outline:
            raise SMPPartitionError(
                f"the model has other layers on rank {rank} than on rank {job.rank()}"
            )
    object.__setattr__(model, "_divided", planned)
    for number, variable in planned.foreign():
        _free(variable, f"smp_{number} (it lives on another rank)")
    if job.dp_size() > 1:
        for weight in model.weights:
            variable = as_tensor(weight)
            variable.assign(job.group("dp").broadcast(np.array(variable.numpy()), 0))
    hooks = list(_hooks)
    _hooks.clear()
    with job.together("a function of smp.register_post_partition_hook"):
        for hook in hooks:
            hook()


def _free(variable: Any, name: str) -> None:
    """Frees the memory of a variable. Who reads it gets an error with a name."""
    handle = tf.raw_ops.VarHandleOp(
        dtype=variable.dtype, shape=variable.shape, shared_name=name, container=""
    )
    # From which graphs know the shape.
    handle._handle_data = variable.handle._handle_data
    variable._handle = handle
