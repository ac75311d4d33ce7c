"""What `evaluate` returns, backups, and variables of strings."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jobs
import numpy as np
import pytest

FEATURES, CLASSES, BATCH, STEPS = 4, 3, 8, 3


def data() -> tuple[np.ndarray, np.ndarray]:
    source = np.random.default_rng(3)
    return source.normal(size=(BATCH * STEPS, FEATURES)), source.integers(0, CLASSES, BATCH * STEPS)


def model_of(tf: Any) -> Any:
    tf.keras.backend.set_floatx("float64")
    tf.keras.utils.set_random_seed(5)
    layer = tf.keras.layers
    model = tf.keras.Sequential([layer.Dense(5, activation="relu"), layer.Dense(CLASSES)])
    model.build((None, FEATURES))
    return model


def evaluated(distributed: bool) -> Any:
    import tensorflow as tf

    rank, size, callbacks = 0, 1, []
    if distributed:
        import smdistributed.dataparallel.tensorflow as sdp

        sdp.init(timeout=60)
        rank, size, callbacks = sdp.rank(), sdp.size(), [sdp.AverageMetrics()]
    model = model_of(tf)
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tf.keras.optimizers.SGD(0.0), loss, metrics=["accuracy"])
    x, y = data()
    mine = x[rank::size], y[rank::size]
    options = {"batch_size": 4, "verbose": 0, "callbacks": callbacks}
    found = [model.evaluate(*mine, return_dict=True, **options)]
    found.append(model.fit(*mine, validation_data=mine, **options).history)
    found.append(model.evaluate(*mine, **options))
    assert all(isinstance(value, float) for value in [*found[0].values(), *found[2]])
    if distributed:
        # Without the callback it returns those of this rank.
        own = model.evaluate(*mine, batch_size=4, verbose=0)
        assert own != found[2]
        assert own == model.evaluate(*mine, batch_size=4, verbose=0)
        sdp.shutdown()
    return found


@jobs.BOTH_KERAS
def test_evaluate_averages_metrics(env: Any) -> None:
    (alone,) = jobs.run(evaluated, "1", False, env=env)
    for found in jobs.run(evaluated, "2", True, env=env):
        for place in (0, 1):
            assert found[place].keys() == alone[place].keys()
            for name, value in alone[place].items():
                np.testing.assert_allclose(found[place][name], value, rtol=1e-6)
        np.testing.assert_allclose(found[2], alone[2], rtol=1e-6)


def backed_up(folder: str, how: str) -> Any:
    """Trains 4 epochs, or ends after 2; returns epochs and variables.

    Args:
        folder: of backups.
        how: "alone"; "together"; or "apart", where rank 1 cannot see the backups of rank 0.
    """
    import tensorflow as tf

    rank, size = 0, 1
    model, optimizer = model_of(tf), tf.keras.optimizers.Adam(0.1)
    if how != "alone":
        import smdistributed.dataparallel.tensorflow as sdp

        sdp.init(timeout=60)
        rank, size = sdp.rank(), sdp.size()
        optimizer = sdp.DistributedOptimizer(optimizer)
        if how == "apart" and rank:
            folder = f"{folder}-{os.getpid()}"
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss)
    x, y = data()
    epochs: list[int] = []

    class Stop(tf.keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 2 and os.environ.get("STOP"):
                raise KeyError("stopped")
            epochs.append(epoch)

    callbacks = [tf.keras.callbacks.BackupAndRestore(folder), Stop()]
    options = {"batch_size": BATCH // size, "shuffle": False, "verbose": 0}
    try:
        model.fit(x[rank::size], y[rank::size], epochs=4, callbacks=callbacks, **options)
    except KeyError:
        assert os.environ.get("STOP")
    if how != "alone":
        sdp.shutdown()
    return epochs, [np.array(one) for one in model.variables]


@jobs.BOTH_KERAS
@pytest.mark.parametrize("how", ["together", pytest.param("apart", marks=pytest.mark.slow)])
def test_a_backup_is_that_of_all_ranks(how: str, env: Any, tmp_path: Path) -> None:
    ((_, alone),) = jobs.run(backed_up, "1", str(tmp_path / "alone"), "alone", env=env)
    folder = str(tmp_path / "backup")
    for found, _ in jobs.run(backed_up, "2", folder, how, env={**env, "STOP": "1"}):
        assert found == [0, 1]
    assert [*Path(folder).rglob("*.index"), *Path(folder).rglob("*.h5")]
    for found, values in jobs.run(backed_up, "2", folder, how, env=env):
        assert found == [2, 3]
        for one, other in zip(values, alone, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9)
    assert not [*Path(folder).rglob("*.index"), *Path(folder).rglob("*.h5")]


def strings() -> None:
    import tensorflow as tf

    import smdistributed.dataparallel.tensorflow as sdp

    sdp.init(timeout=60)
    me = sdp.rank()
    words = [[[b"", b"a\0\xff"], [b"long " * 1000, "ü".encode()]], [[b"x", b"y"], [b"", b""]]]
    for how in (sdp.broadcast, tf.function(sdp.broadcast, autograph=False)):
        assert how(tf.constant(words[me]), 0).numpy().tolist() == words[0]
        assert how(tf.constant(b"one" if me else b""), 1).numpy() == b"one"
        assert how(tf.zeros([0], tf.string), 1).shape == (0,)
    variables = [tf.Variable(words[me]), tf.Variable(1.0 * me), tf.Variable("own" if me else "")]
    sdp.broadcast_variables(variables, 1)
    found = [variable.numpy() for variable in variables]
    assert (found[0].tolist(), found[1], found[2]) == (words[1], 1.0, b"own")
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        v1.get_variable("words", initializer=tf.constant(words[me]))
        v1.get_variable("number", initializer=1.0 * me)
        send = sdp.broadcast_global_variables(1)
        session.run(v1.global_variables_initializer())
        session.run(send)
        first, second = session.run(v1.global_variables())
        assert (first.tolist(), second) == (words[1], 1.0)
    sdp.shutdown()


def test_strings_are_broadcast() -> None:
    jobs.run(strings, "2")
