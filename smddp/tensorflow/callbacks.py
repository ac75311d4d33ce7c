"""What trains with `model.fit`, or a session of TensorFlow 1, on many ranks."""

from __future__ import annotations

import functools
import warnings
import zlib
from typing import Any

import numpy as np
import tensorflow as tf

from smddp.tensorflow import job
from smddp.tensorflow.collectives import broadcast, broadcast_variables, oob_allreduce

__all__ = [
    "AverageMetrics",
    "BroadcastGlobalVariablesHook",
    "BroadcastVariables",
    "broadcast_global_variables",
    "install_backups",
    "shard",
    "variables_of",
]


class BroadcastVariables(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Gives all ranks the model and the optimizer of one rank, after the first batch.

    Args:
        root_rank: a rank.
    """

    def __init__(self, root_rank: int = 0) -> None:
        super().__init__()
        self._root, self._is_done = root_rank, False

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Does it: layers and optimizers may have made their variables in that batch only."""
        if not self._is_done:
            broadcast_variables(self.model.variables, self._root)
            broadcast_variables(variables_of(self.model.optimizer), self._root)
            self._is_done = True


def variables_of(optimizer: Any) -> Any:
    """Returns the variables of an optimizer of Keras 2 or 3."""
    variables = optimizer.variables
    return variables() if callable(variables) else variables


class AverageMetrics(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Averages the metrics of an epoch over ranks, and what `evaluate` returns.

    Put it before callbacks that read them.
    """

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Changes the metrics in `logs`, which later callbacks get.

        Raises:
            ValueError: ranks have different metrics.
        """
        _average(logs or {})

    def on_test_begin(self, logs: Any = None) -> None:
        """Lets `evaluate` average its metrics: what callbacks get at its end is a copy."""
        model = self.model
        for name in ("_get_metrics_result_or_logs", "_validate_and_get_metrics_result"):
            former = getattr(type(model), name, None)  # of Keras 3, of Keras 2
            if former is not None:
                object.__setattr__(model, name, functools.partial(_averaged, model, name, former))
                return
        warnings.warn(
            "smddp: AverageMetrics does not know this Keras: `evaluate` returns the metrics of "
            "this rank; average them by oob_allreduce",
            RuntimeWarning,
            stacklevel=2,
        )


def _averaged(model: Any, name: str, former: Any, logs: Any) -> Any:
    object.__delattr__(model, name)  # once
    found = dict(former(model, logs) or {})
    _average(found)
    return found


def _average(logs: dict[str, Any]) -> None:
    names = sorted(logs)
    values = [np.asarray(logs[name], np.float64) for name in names]
    own = zlib.crc32(repr([(names, [value.shape for value in values])]).encode())
    others = np.flatnonzero(job.group().allgather(np.array(own)) != own).tolist()
    if others:
        raise ValueError(
            f"smddp: AverageMetrics: rank {job.rank()} has the metrics {names}, rank(s) "
            f"{others} have others: give `fit` and `evaluate` the same metrics, and `fit` "
            "validation data, on all ranks"
        )
    together = np.concatenate([np.zeros(0), *map(np.ravel, values)])
    means = oob_allreduce(tf.constant(together)).numpy()
    for name, value in zip(names, values, strict=True):
        mean, means = means[: value.size].reshape(value.shape), means[value.size :]
        logs[name] = mean if value.ndim else float(mean)


def install_backups() -> None:
    """Lets `BackupAndRestore` of Keras 2 and 3 serve all ranks: rank 0 saves, all get its state."""
    kind = tf.keras.callbacks.BackupAndRestore
    begin = kind.on_train_begin

    @functools.wraps(begin)
    def on_train_begin(self: Any, logs: Any = None) -> None:
        begin(self, logs)
        if job.is_shared():
            self.delete_checkpoint = self.delete_checkpoint and job.rank() == 0
            _share_backup(self)

    kind.on_train_begin = on_train_begin
    for name in ("_save_model", "_backup"):  # of Keras 3, of Keras 2
        if hasattr(kind, name):
            setattr(kind, name, _on_first_rank(getattr(kind, name)))


def _on_first_rank(save: Any) -> Any:
    @functools.wraps(save)
    def saved(self: Any, *args: Any, **kwargs: Any) -> None:
        if not job.is_shared() or job.rank() == 0:
            save(self, *args, **kwargs)

    return saved


def _share_backup(callback: Any) -> None:
    """Gives all ranks what rank 0 has restored. Others may not see its folder."""
    model, state = callback.model, getattr(callback, "_training_state", None)
    if model.built:
        optimizer = model.optimizer
        if not getattr(optimizer, "built", True):  # Keras 3 does it if there is a backup
            optimizer.build(model.trainable_variables)
        broadcast_variables(model.variables, 0)
        broadcast_variables(variables_of(optimizer) if optimizer else [], 0)
    if state is not None:  # Keras 2
        counters = [state._ckpt_saved_epoch, state._ckpt_saved_batch, model._train_counter]
        broadcast_variables(counters, 0)
        return
    epoch = tf.constant(model._initial_epoch or 0, tf.int64)
    model._initial_epoch = int(broadcast(epoch, 0)) or None


def shard(dataset: tf.data.Dataset, *, drop_remainder: bool = True) -> tf.data.Dataset:
    """Returns this rank's part of a dataset: every element whose number, modulo ranks, is its own.

    Args:
        dataset: the same one on all ranks; shuffle it with the same seed, or after this.
        drop_remainder: leave out the last elements if not all ranks would get one: they have to
            make equally many steps.

    Raises:
        TypeError: it is no dataset.
    """
    if not isinstance(dataset, tf.data.Dataset):
        raise TypeError(
            f"smddp: shard takes a tf.data.Dataset, and not a {type(dataset).__name__}: make one "
            "by tf.data.Dataset.from_tensor_slices(data)"
        )
    group = job.group()
    size = int(dataset.cardinality())
    if not drop_remainder or size == tf.data.INFINITE_CARDINALITY:
        return dataset.shard(group.size, group.rank)
    if size != tf.data.UNKNOWN_CARDINALITY:
        return dataset.take(size // group.size * group.size).shard(group.size, group.rank)

    def mine(*parts: Any) -> tf.data.Dataset:
        # A window has a dataset for each component of the elements.
        is_tuple = type(dataset.element_spec) is tuple  # a named one is not taken apart
        whole = tf.data.Dataset.zip(parts if is_tuple else parts[0])
        return whole.skip(group.rank).take(1)

    return dataset.window(group.size, drop_remainder=True).flat_map(mine)


def broadcast_global_variables(root_rank: int) -> Any:
    """Returns an operation that gives a graph's global variables the values of one rank.

    Raises:
        RuntimeError: in eager code, where there are none.
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "smddp: eager code has no global variables: use broadcast_variables(variables, root)"
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Broadcasts all global variables when a session of TensorFlow 1 begins.

    Args:
        root_rank: a rank.
        device: accepted.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self._root = root_rank
        self._operation: Any = None

    def begin(self) -> None:
        """Adds the operation to the graph."""
        with tf.control_dependencies(None):
            self._operation = broadcast_global_variables(self._root)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Runs it."""
        session.run(self._operation)
