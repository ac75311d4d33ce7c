"""`BatchNormalization(synchronized=True)`: ranks use the moments of one process with all rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jobs
import numpy as np
import pytest

FEATURES, CLASSES, BATCH, STEPS = 6, 3, 12, 3


def data() -> tuple[np.ndarray, np.ndarray]:
    source = np.random.default_rng(3)
    count = BATCH * STEPS
    # Rows of a rank resemble one another, but not those of the other; their mean is large.
    shift = 100 + 20 * (np.arange(count) % 2)
    x = source.normal(size=(count, 4, FEATURES)) + shift[:, None, None]
    return x, source.integers(0, CLASSES, count)


def trained(how: str, distributed: bool) -> list[Any]:
    import tensorflow as tf

    rank, size = 0, 1
    if distributed:
        import smdistributed.dataparallel.tensorflow as sdp

        sdp.init(timeout=60)
        rank, size = sdp.rank(), sdp.size()
    keras, layer = tf.keras, tf.keras.layers
    keras.backend.set_floatx("float64")
    keras.utils.set_random_seed(5)
    model = keras.Sequential(
        [
            layer.BatchNormalization(axis=1, synchronized=True),
            layer.Dense(5, activation="tanh"),
            layer.BatchNormalization(synchronized=True),
            layer.Flatten(),
            layer.Dense(CLASSES),
        ]
    )
    model.build((None, 4, FEATURES))
    optimizer: Any = keras.optimizers.SGD(0.5)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    x, y = data()
    x, y = x[rank::size], y[rank::size]
    batch = BATCH // size
    if how == "fit":
        if distributed:
            optimizer = sdp.DistributedOptimizer(optimizer)
        model.compile(optimizer, loss_of)
        model.fit(x, y, batch_size=batch, epochs=2, shuffle=False, verbose=0)
        model.evaluate(x[: 2 + rank], y[: 2 + rank], verbose=0)  # uses averages of batches
    else:

        def step(rows: Any, labels: Any) -> None:
            with tf.GradientTape() as tape:
                loss = loss_of(labels, model(rows, training=True))
            if distributed:
                tape = sdp.DistributedGradientTape(tape)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        run = tf.function(step) if how == "graph" else step
        for begin in range(0, len(x), batch):
            run(tf.constant(x[begin : begin + batch]), tf.constant(y[begin : begin + batch]))
    values = [np.array(variable) for variable in model.variables]
    if distributed:
        sdp.shutdown()
    return values


def check(layout: str, how: str, env: dict[str, str]) -> None:
    (alone,) = jobs.run(trained, "1", how, False, env=env)
    for found in jobs.run(trained, layout, how, True, env=env):
        assert len(found) == len(alone) == 12
        for one, other in zip(found, alone, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9)


@jobs.BOTH_KERAS
@pytest.mark.parametrize("how", ["fit", "eager", pytest.param("graph", marks=pytest.mark.slow)])
def test_batches_are_normalized_as_in_one_process(how: str, env: Any) -> None:
    check("2", how, env)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "variables"), [("2x2", {}), ("2", {"CXX": "/bin/false"})], ids=["nodes", "numpy"]
)
def test_between_nodes_and_without_a_compiler(
    layout: str, variables: dict[str, str], tmp_path: Path
) -> None:
    check(layout, "graph", {**variables, "XDG_CACHE_HOME": str(tmp_path)} if variables else {})


def moments(distributed: bool) -> list[Any]:
    """Returns results, averages and gradients of single layers; ranks have 4 rows and 1.

    Alone a layer is not synchronized: Keras would subtract large squares then.
    """
    import tensorflow as tf

    rank = 0
    if distributed:
        import smdistributed.dataparallel.tensorflow as sdp

        sdp.init(timeout=60)
        rank = sdp.rank()
    source = np.random.default_rng(3)
    rows = slice(4 * rank, 4 + rank) if distributed else slice(0, 5)
    found = []
    for kind in ("float16", "float32", "float64"):
        for masked in (False, True):
            x = source.normal(size=(5, 3, 2)) + 1000 * (kind != "float16" and not masked)
            mask = source.integers(0, 2, (5, 3)).astype(bool)
            mask[4] = False  # the second rank has nothing
            mask[0] = True
            weights = source.normal(size=x.shape)
            if masked:
                x[4] = 1e4
            layer = tf.keras.layers.BatchNormalization(
                synchronized=distributed, momentum=0.0, dtype=kind
            )
            given = tf.constant(x[rows], kind)
            with tf.GradientTape() as tape:
                tape.watch(given)
                options = {"mask": tf.constant(mask[rows])} if masked else {}
                made = tf.cast(layer(given, training=True, **options), "float64")
                if masked:
                    made = tf.where(mask[rows][..., None], made, 0.0)
                loss = tf.reduce_sum(made * weights[rows])
            gradient = tape.gradient(loss, given)
            averages = [np.array(one) for one in layer.non_trainable_variables]
            found.append([made.numpy(), gradient.numpy(), *averages])
    if distributed:
        sdp.shutdown()
    return found


@jobs.BOTH_KERAS
def test_masks_types_and_unequal_batches(env: Any) -> None:
    (alone,) = jobs.run(moments, "1", False, env=env)
    ranks = jobs.run(moments, "2", True, env=env)
    for number, expected in enumerate(alone):
        first, second = (rank[number] for rank in ranks)
        tolerance = (2e-2, 2e-3, 1e-6)[number // 2]
        close = {"rtol": tolerance, "atol": tolerance}
        for place in (0, 1):
            together = np.concatenate([first[place], second[place]])
            np.testing.assert_allclose(together, expected[place], **close, err_msg=str(number))
        for place in (2, 3):
            np.testing.assert_allclose(first[place], expected[place], **close)
            assert np.array_equal(first[place], second[place])
