"""`smp.CheckpointManager`: each partition saves its part of a checkpoint."""

from __future__ import annotations

import glob
import json
import os
from pathlib import Path
from typing import Any

import tensorflow as tf

from smddp.modelparallel.core.errors import SMPPartitionError, SMPUsageError
from smddp.modelparallel.tensorflow import job
from smddp.modelparallel.tensorflow.model import DistributedModel, current
from smddp.modelparallel.tensorflow.values import as_tensor
from smddp.tensorflow.callbacks import variables_of

__all__ = ["CheckpointManager"]


class CheckpointManager:
    """Saves and restores a `tf.train.Checkpoint` whose model and optimizer are divided.

    All ranks call its methods, after the first step. The ranks of the first replica save, each in
    a folder of its own; all ranks restore, so all need the directory.

    Attributes:
        checkpoint: that of the script.
    """

    def __init__(
        self,
        checkpoint: Any,
        directory: str = "/opt/ml/checkpoints",
        max_to_keep: int | None = None,
        checkpoint_name: str = "ckpt",
    ) -> None:
        """Writes nothing yet.

        Args:
            checkpoint: a `tf.train.Checkpoint` of the smp.DistributedModel, optimizers and others.
            directory: a folder.
            max_to_keep: of so many checkpoints, older ones are deleted; None for no limit.
            checkpoint_name: how names of checkpoints begin.

        Raises:
            SMPUsageError: max_to_keep is not positive.
        """
        if max_to_keep is not None and max_to_keep < 1:
            raise SMPUsageError(f"CheckpointManager: max_to_keep is {max_to_keep}, not 1 or more")
        self.checkpoint = checkpoint
        self._directory, self._name, self._keep = Path(directory), checkpoint_name, max_to_keep
        self._next = 1

    def save(self, checkpoint_number: int | None = None) -> str:
        """Saves, and returns the name of the checkpoint, such as "ckpt-3".

        Args:
            checkpoint_number: None for the next one.

        Raises:
            SMPUsageError: before the first step.
            SMPPeerError: another rank could not save; on that, its own error.
        """
        number = self._next if checkpoint_number is None else checkpoint_number
        with job.together("CheckpointManager.save"):
            mine = self._mine()
            if job.dp_rank() == 0:
                folder = self._folder(job.pp_rank())
                folder.mkdir(parents=True, exist_ok=True)
                _write(folder / "division.json", json.dumps(_division()))
                # It deletes none: if another rank cannot save, an older one has to be left.
                manager = tf.train.CheckpointManager(
                    mine, str(folder), None, checkpoint_name=self._name
                )
                manager.save(checkpoint_number=number)
        self._next = number + 1
        with job.together("CheckpointManager.save"):
            if self._keep is not None and job.dp_rank() == 0:
                _delete_older(folder, self._keep)
        return f"{self._name}-{number}"

    def restore(self, restore_prefix: str | None = None) -> str | None:
        """Restores a checkpoint, and returns its name; None if there is none.

        Args:
            restore_prefix: the name, or a path that ends in it; None for the one that was saved
                last, of those that all partitions have.

        Raises:
            SMPUsageError: before the first step, there is no such checkpoint, or one of its
                optimizers has more variables.
            SMPPartitionError: it was saved from another model, or with another division.
            SMPPeerError: another rank could not restore; on that, its own error.
        """
        with job.together("CheckpointManager.restore"):
            mine, complete = self._mine(), self._complete()
        everybody: list[list[str]] = job.exchange("world", complete)
        common = set.intersection(*map(set, everybody))
        if restore_prefix is None:
            if not common:
                return None
            # As they were saved: a later run may have begun to count anew.
            name: str = max(common, key=everybody[0].index)
        else:
            name = Path(restore_prefix).name
            lacking = [rank for rank, names in enumerate(everybody) if name not in names]
            if lacking:
                raise SMPUsageError(
                    f"CheckpointManager.restore: {self._directory} has no checkpoint {name!r} for "
                    f"rank(s) {lacking} of the job; all ranks have {sorted(common) or 'none'}"
                )
        with job.together("CheckpointManager.restore"):
            folder = self._folder(job.pp_rank())
            if json.loads((folder / "division.json").read_text()) != _division():
                raise SMPPartitionError(
                    f"the checkpoint in {self._directory} was saved from another model, or with "
                    "another division: use the same `partitions`, and the same smp.partition"
                )
            self._check_optimizers(mine, str(folder / name))
            mine.restore(str(folder / name)).assert_existing_objects_matched()
        self._next = _number_of(name) + 1
        return name

    def _folder(self, part: int) -> Path:
        return self._directory / f"partition_{part}"

    def _complete(self) -> list[str]:
        """Returns the names of this partition's checkpoints, in the order of their saving."""
        found = tf.train.get_checkpoint_state(str(self._folder(job.pp_rank())))
        paths = [] if found is None else found.all_model_checkpoint_paths
        return [Path(path).name for path in paths if Path(path).name.startswith(f"{self._name}-")]

    def _mine(self) -> Any:
        """Returns a checkpoint of what this rank has of that of the script."""
        model = current()
        if model._divided is None:
            raise SMPUsageError("smp.CheckpointManager works after the first call of a step")
        parts: dict[str, Any] = {}
        for name, item in self.checkpoint._trackable_children().items():
            if isinstance(item, DistributedModel):
                parts[name] = {
                    str(number): as_tensor(weight)
                    for number, weight in enumerate(model._divided.weights)
                    if model._divided.is_mine(weight)
                }
            elif _is_optimizer(item):
                _build(item, model.trainable_variables)
                held = map(as_tensor, variables_of(item))
                parts[name] = {str(number): variable for number, variable in enumerate(held)}
            else:
                parts[name] = item
        parts.pop("save_counter", None)
        return tf.train.Checkpoint(**parts)

    def _check_optimizers(self, mine: Any, path: str) -> None:
        """Checks that optimizers have all variables of a checkpoint; TensorFlow would ignore some.

        Raises:
            SMPUsageError: one has not.
        """
        keys, parts = [key for key, _ in tf.train.list_variables(path)], mine._trackable_children()
        for name, item in self.checkpoint._trackable_children().items():
            saved = {key.split("/")[1] for key in keys if key.startswith(f"{name}/")}
            if _is_optimizer(item) and not saved <= parts[name].keys():
                raise SMPUsageError(
                    f"CheckpointManager.restore: {name!r} has more variables in the checkpoint "
                    f"{path} than here, where it has {len(parts[name])}: make an optimizer of the "
                    "same class, with the same arguments"
                )


def _is_optimizer(item: Any) -> bool:
    return hasattr(item, "apply_gradients")


def _build(optimizer: Any, variables: Any) -> None:
    """Makes an optimizer's variables, unless it has them; else a value would have no place."""
    if hasattr(optimizer, "_create_all_weights"):  # a legacy one of Keras 2
        optimizer._create_all_weights(variables)
        return
    is_built = getattr(optimizer, "built", getattr(optimizer, "_built", False))  # Keras 3, Keras 2
    if hasattr(optimizer, "build") and not is_built:
        optimizer.build(variables)


def _delete_older(folder: Path, keep: int) -> None:
    """Deletes all but the last `keep` checkpoints of a folder."""
    state = tf.train.get_checkpoint_state(str(folder))
    names = [Path(path).name for path in state.all_model_checkpoint_paths]
    state.model_checkpoint_path = names[-1]
    state.all_model_checkpoint_paths[:] = names[-keep:]
    del state.all_model_checkpoint_timestamps[:-keep]
    _write(folder / "checkpoint", str(state))
    for name in names[:-keep]:
        for file in folder.glob(f"{glob.escape(name)}.*"):
            file.unlink()


def _write(path: Path, text: str) -> None:
    """Writes a file, whole or not at all."""
    written = path.with_name(f"{path.name}.new")
    written.write_text(text)
    os.replace(written, path)


def _division() -> Any:
    divided = current()._divided
    return json.loads(json.dumps([divided.model.outline(), divided.owners]))


def _number_of(name: str) -> int:
    return int(name.rpartition("-")[2])
