"""What the ranks of tensorflow_speed.py run, in the environment with TensorFlow; prints JSON."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import smdistributed.dataparallel.tensorflow as sdp

CLASSES, FEATURES = 10, 784


def operations() -> dict[str, list[float]]:
    """Returns µs of a call with 4 bytes, one value per round; the variants take turns.

    The rounds are short, so that many of them lie between two turns of other programs.
    """
    sdp.init()
    calls: dict[str, Callable[[Any], Any]] = {
        "identity": tf.identity,
        "allreduce": lambda x: sdp.allreduce(x, 0, 1),
        "oob_allreduce": lambda x: sdp.oob_allreduce(x),
    }
    variants = {f"{name}, eager": call for name, call in calls.items()}
    variants |= {f"{name}, graph": tf.function(call) for name, call in calls.items()}
    found: dict[str, list[float]] = {name: [] for name in variants}
    x, count = tf.constant(1.0), 20
    for turn in range(301):
        for name, call in variants.items():
            sdp.oob_allreduce(x)  # begin together
            began = time.perf_counter()
            for _ in range(count):
                call(x)
            if turn:  # the first compiles
                found[name].append((time.perf_counter() - began) / count * 1e6)
    return found


class Times(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Notes the ms per step of each epoch."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps, self.began = steps, 0.0
        self.found: list[float] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begins."""
        self.began = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Ends; the first epoch compiles."""
        if epoch:
            self.found.append((time.perf_counter() - self.began) / self.steps * 1e3)


def compiled(widths: list[int], wrap: Callable[[Any], Any] = lambda optimizer: optimizer) -> Any:
    """Returns a model of Keras, ready for `fit`."""
    dense = tf.keras.layers.Dense
    model = tf.keras.Sequential(
        [*(dense(width, activation="relu") for width in widths), dense(CLASSES)]
    )
    model.build((None, FEATURES))
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=wrap(tf.keras.optimizers.SGD(0.01)), loss=loss)
    return model


def steps(how: str, widths: list[int], batch: int, count: int, epochs: int) -> list[float]:
    """Returns ms per step of each epoch of `fit`.

    Args:
        how: "mirrored", "smddp", or "alone", which is a rank's share of the work without others.
        widths: of the layers.
        batch: rows of all ranks together.
        count: steps of an epoch.
        epochs: how many to time.
    """
    times: list[Any] = [Times(count)]
    if how == "mirrored":
        options = tf.distribute.experimental.CommunicationOptions(
            implementation=tf.distribute.experimental.CommunicationImplementation.RING
        )
        strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    source = np.random.default_rng(0)
    rows = source.normal(size=(batch * 20, FEATURES)).astype(np.float32)
    dataset = tf.data.Dataset.from_tensor_slices((rows, source.integers(0, CLASSES, batch * 20)))
    ranks = int(os.environ["WORLD_SIZE"])
    if how == "mirrored":
        sharding = tf.data.Options()
        sharding.experimental_distribute.auto_shard_policy = (
            tf.data.experimental.AutoShardPolicy.DATA
        )
        dataset = dataset.batch(batch).with_options(sharding)
        with strategy.scope():
            model = compiled(widths)
    elif how == "smddp":
        sdp.init()
        dataset = sdp.shard(dataset).batch(batch // ranks)
        model = compiled(widths, sdp.DistributedOptimizer)
        times.append(sdp.BroadcastVariables(0))
    else:
        dataset = dataset.batch(batch // ranks)
        model = compiled(widths)
    dataset = dataset.cache().repeat().prefetch(4)
    model.fit(dataset, steps_per_epoch=count, epochs=epochs + 1, verbose=0, callbacks=times)
    return list(times[0].found)


if __name__ == "__main__":
    function, arguments = json.loads(sys.argv[1])
    print(json.dumps({"operations": operations, "steps": steps}[function](*arguments)), flush=True)
    # MultiWorkerMirroredStrategy may wait for others at the end.
    os._exit(0)
