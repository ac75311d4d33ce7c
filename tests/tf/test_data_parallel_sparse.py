"""Sparse gradients, as those of embeddings: ranks train what one process trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jobs
import numpy as np
import pytest

WORDS, LENGTH, CLASSES, BATCH, STEPS = 11, 4, 3, 12, 4


def data() -> tuple[np.ndarray, np.ndarray]:
    """Returns sentences with words that come several times in a batch, and classes."""
    source = np.random.default_rng(3)
    count = BATCH * STEPS
    return source.integers(0, WORDS, (count, LENGTH)), source.integers(0, CLASSES, count)


def trained(how: str, distributed: bool, policy: str = "float64") -> list[Any]:
    """Trains an embedding by Adam, which squares each row of a sparse gradient in Keras 3."""
    import tensorflow as tf

    rank, size = 0, 1
    if distributed:
        import smdistributed.dataparallel.tensorflow as sdp

        sdp.init(timeout=60)
        rank, size = sdp.rank(), sdp.size()
    keras = tf.keras
    if policy == "float64":
        keras.backend.set_floatx(policy)  # Adam enlarges what rounding makes of a sum
    else:
        keras.mixed_precision.set_global_policy(policy)
    keras.utils.set_random_seed(5)
    layer = keras.layers
    model = keras.Sequential(
        [layer.Embedding(WORDS, 5), layer.GlobalAveragePooling1D(), layer.Dense(CLASSES)]
    )
    model.build((None, LENGTH))
    optimizer: Any = keras.optimizers.Adam(0.1, clipnorm=0.05)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    x, y = data()
    x, y = x[rank::size], y[rank::size]
    batch = BATCH // size
    if how == "fit":
        if distributed:
            optimizer = sdp.DistributedOptimizer(optimizer)
        model.compile(optimizer, loss_of)
        model.fit(x, y, batch_size=batch, epochs=2, shuffle=False, verbose=0)
    else:

        def step(words: Any, labels: Any) -> None:
            with tf.GradientTape() as tape:
                loss = loss_of(labels, model(words, training=True))
            if distributed:
                tape = sdp.DistributedGradientTape(tape)
            gradients = tape.gradient(loss, model.trainable_variables)
            assert isinstance(gradients[0], tf.IndexedSlices)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        run = tf.function(step) if how == "graph" else step
        for begin in range(0, len(x), batch):
            run(tf.constant(x[begin : begin + batch]), tf.constant(y[begin : begin + batch]))
    values = [np.array(variable) for variable in model.trainable_variables]
    if distributed:
        sdp.shutdown()
    return values


@jobs.BOTH_KERAS
@pytest.mark.parametrize("how", ["fit", "eager", pytest.param("graph", marks=pytest.mark.slow)])
def test_embeddings_train_as_in_one_process(how: str, env: Any) -> None:
    (alone,) = jobs.run(trained, "1", how, False, env=env)
    layout = "3" if how == "eager" else "2"
    for found in jobs.run(trained, layout, how, True, env=env):
        for one, other in zip(found, alone, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "variables"), [("2x2", {}), ("2", {"CXX": "/bin/false"})], ids=["nodes", "numpy"]
)
def test_embeddings_between_nodes_and_without_a_compiler(
    layout: str, variables: dict[str, str], tmp_path: Path
) -> None:
    env = {**variables, "XDG_CACHE_HOME": str(tmp_path)} if variables else {}
    (alone,) = jobs.run(trained, "1", "graph", False)
    for found in jobs.run(trained, layout, "graph", True, env=env):
        for one, other in zip(found, alone, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@jobs.BOTH_KERAS
def test_embeddings_with_scaled_losses(env: Any) -> None:
    (alone,) = jobs.run(trained, "1", "fit", False, "mixed_float16", env=env)
    for found in jobs.run(trained, "2", "fit", True, "mixed_float16", env=env):
        for one, other in zip(found, alone, strict=True):
            np.testing.assert_allclose(one, other, rtol=0.05, atol=0.05)


def combined() -> None:
    """Compares with sums of tensors; ranks have other numbers of rows, or none."""
    import tensorflow as tf

    import smdistributed.dataparallel.tensorflow as sdp
    from smddp.tensorflow.gradients import averaged

    sdp.init(timeout=60)
    me, size = sdp.rank(), sdp.size()
    source = np.random.default_rng(7)
    table = tf.Variable(tf.zeros((6, 2)))
    bias, other = tf.Variable(tf.zeros(3)), tf.Variable(tf.zeros((4, 2), tf.float64))
    as_dense = tf.convert_to_tensor
    for counts in ([2, 5, 1], [0, 3, 0], [0, 0, 0]):
        rows = [source.integers(0, 6, count) for count in counts]
        values = [source.normal(size=(count, 2)).astype(np.float32) for count in counts]
        total = np.zeros((6, 2))
        for index, value in zip(rows[:size], values[:size], strict=True):
            np.add.at(total, index, value)
        kind = [tf.int32, tf.int64][me % 2]

        def call(value: Any, index: Any, op: Any, **options: Any) -> list[Any]:
            slices = tf.IndexedSlices(value, index, tf.constant([6, 2], index.dtype))
            twice = tf.IndexedSlices(tf.cast(value, tf.float64), index % 4, tf.constant([4, 2]))
            dense = tf.ones(3) * (me + 1)
            return averaged([slices, dense, twice], [table, bias, other], op, **options)

        given = tf.constant(values[me]), tf.constant(rows[me], kind)
        for how in (call, tf.function(call)):
            (dense, _, _) = how(*given, sdp.ReduceOp.SUM, sparse_as_dense=True)
            assert isinstance(dense, tf.Tensor)
            np.testing.assert_allclose(dense, total, rtol=1e-6, atol=1e-6)
            for op, scale, compression, tolerance in (
                (sdp.ReduceOp.SUM, 1, sdp.Compression.none, 1e-6),
                (sdp.ReduceOp.AVERAGE, 1 / size, sdp.Compression.fp16, 1e-2),
            ):
                made = how(*given, op, compression=compression)
                assert isinstance(made[0], tf.IndexedSlices)
                assert made[0].indices.dtype == kind
                # Each row by itself, as in the gradient of one process.
                assert made[0].values.shape == (sum(counts[:size]), 2)
                close = {"rtol": tolerance, "atol": tolerance}
                np.testing.assert_allclose(as_dense(made[0]), total * scale, **close)
                folded = total[:4].copy()
                folded[:2] += total[4:]
                np.testing.assert_allclose(as_dense(made[2]), folded * scale, **close)
                expected = np.ones(3) * size * (size + 1) / 2 * scale
                np.testing.assert_allclose(made[1], expected, **close)
            (most, _, _) = how(*given, sdp.ReduceOp.MAX)
            assert isinstance(most, tf.Tensor)

    # The loss of one rank only uses the table: all ranks add tensors then.
    def gradients(last: int) -> list[Any]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(bias) * 2.0
            if me == last:
                loss += tf.reduce_sum(tf.gather(table, [1, 1, 3]) * 3.0)
        return sdp.DistributedGradientTape(tape).gradient(loss, [table, bias])

    for how in (gradients, tf.function(gradients)):
        for last in range(2):
            found, dense = how(last)
            assert isinstance(found, tf.IndexedSlices) == (me == last)
            expected = np.zeros((6, 2))
            expected[1], expected[3] = 6 / size, 3 / size
            np.testing.assert_allclose(as_dense(found), expected)
            np.testing.assert_allclose(dense, [2.0] * 3)
            optimizer = tf.keras.optimizers.Adam(0.1)
            optimizer.apply_gradients([(found, table)])
            assert np.ptp(sdp.allgather(as_dense(table)).numpy(), axis=0).max() == 0
    sdp.shutdown()


@pytest.mark.parametrize("layout", ["2", pytest.param("3", marks=pytest.mark.slow)])
def test_rows_of_all_ranks(layout: str) -> None:
    jobs.run(combined, layout, timeout=120)
