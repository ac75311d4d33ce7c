"""Training and values over data parallelism in TensorFlow."""

from __future__ import annotations

import collections
import os
from pathlib import Path
from typing import Any

import jobs
import numpy as np
import pytest
from jobs import error_of


def scaled() -> list[Any]:
    import tensorflow as tf

    import smdistributed.dataparallel.tensorflow as sdp

    sdp.init(timeout=60)
    keras = tf.keras
    policy = keras.mixed_precision.set_global_policy
    policy("mixed_float16")
    model = keras.Sequential([keras.layers.Dense(1, kernel_initializer="ones", use_bias=False)])
    model.build((None, 2))
    optimizer = sdp.DistributedOptimizer(keras.optimizers.SGD(0.25))
    model.compile(optimizer=optimizer, loss="mse")
    assert isinstance(model.optimizer, keras.mixed_precision.LossScaleOptimizer)
    found = []
    for step in range(4):
        x = np.ones((2, 2), np.float32)
        if step == 1 and sdp.rank() == 1:
            x *= np.inf  # on this rank only
        model.fit(x, np.zeros((2, 1)), verbose=0, batch_size=2)
        found.append(model.trainable_variables[0].numpy().tolist())
    with pytest.raises(ValueError, match="is a DistributedOptimizer already"):
        sdp.DistributedOptimizer(model.optimizer)
    policy("float32")
    sdp.shutdown()
    return found


@jobs.BOTH_KERAS
def test_all_ranks_skip_the_same_steps(env: Any) -> None:
    first, second = jobs.run(scaled, "2", env=env)
    assert first == second
    assert np.isfinite(first).all()
    # The initial scale is too large for one step, or none, and the second step is skipped.
    assert first[0] == first[1]
    assert first[-1] != first[1]


def recompiled() -> list[list[Any]]:
    """Gives the same optimizer to `compile` twice, and uses it without scales at last."""
    import tensorflow as tf

    import smdistributed.dataparallel.tensorflow as sdp

    sdp.init(timeout=60)
    keras = tf.keras
    keras.mixed_precision.set_global_policy("mixed_float16")
    x = np.full((2, 2), (1 + sdp.rank()) / 4, np.float32)
    found = []
    for op, rate in ((sdp.ReduceOp.AVERAGE, 0.25), (sdp.ReduceOp.SUM, 0.125)):
        model = keras.Sequential([keras.layers.Dense(1, kernel_initializer="ones", use_bias=False)])
        model.build((None, 2))
        optimizer = sdp.DistributedOptimizer(keras.optimizers.SGD(rate), op=op)
        values, compiled = [], optimizer
        for _ in range(2):
            model.compile(optimizer=compiled, loss="mse")
            if os.environ.get("TF_USE_LEGACY_KERAS"):
                compiled = model.optimizer  # Keras 2 refuses to put another one around the first
            assert isinstance(model.optimizer, keras.mixed_precision.LossScaleOptimizer)
            for _ in range(3):
                model.fit(x, np.zeros((2, 1)), verbose=0)
                values.append(model.trainable_variables[0].numpy().tolist())
        gradient = tf.constant([[1.0], [1.0]]) * (1.0 + sdp.rank())
        optimizer.apply_gradients([(gradient, model.trainable_variables[0])])
        values.append(model.trainable_variables[0].numpy().tolist())
        found.append(values)
    sdp.shutdown()
    return found


@jobs.BOTH_KERAS
def test_an_optimizer_that_is_compiled_twice_averages_once_each_time(env: Any) -> None:
    first, second = jobs.run(recompiled, "2", env=env)
    assert first == second
    averages, sums = first
    assert averages == sums
    assert len({str(value) for value in averages}) > 4  # it has trained
    change = np.array(averages[-1]) - averages[-2]
    np.testing.assert_allclose(change, [[-0.25 * 1.5]] * 2, rtol=1e-6)


def saved(folder: str) -> None:
    import tensorflow as tf

    import smdistributed.dataparallel.tensorflow as sdp

    sdp.init(timeout=60)
    for policy in ("float32", "mixed_float16"):
        tf.keras.mixed_precision.set_global_policy(policy)
        model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
        model.build((None, 2))
        optimizer = sdp.DistributedOptimizer(tf.keras.optimizers.Adam(0.25), bucket_cap_mb=0.5)
        model.compile(optimizer=optimizer, loss="mse")
        x = np.ones((4, 2), np.float32)
        model.fit(x, x[:, :1], verbose=0)
        model.save(f"{folder}/{policy}{sdp.rank()}.keras")
    sdp.shutdown()


def loaded(folder: str) -> None:
    import tensorflow as tf

    for policy in ("float32", "mixed_float16"):
        tf.keras.mixed_precision.set_global_policy(policy)
        model = tf.keras.models.load_model(f"{folder}/{policy}0.keras")
        optimizer = model.optimizer
        if policy != "float32":
            assert isinstance(optimizer, tf.keras.mixed_precision.LossScaleOptimizer)
            optimizer = optimizer.inner_optimizer
        assert type(optimizer) is tf.keras.optimizers.Adam
        assert float(optimizer.learning_rate) == 0.25
        x = np.ones((4, 2), np.float32)
        model.fit(x, x[:, :1], verbose=0)


@jobs.BOTH_KERAS
def test_a_saved_model_is_that_of_keras(env: Any, tmp_path: Path) -> None:
    jobs.run(saved, "2", str(tmp_path), env=env, timeout=120)
    jobs.run(loaded, "1", str(tmp_path), env=env, timeout=120)


def unused() -> None:
    import tensorflow as tf

    import smdistributed.dataparallel.tensorflow as sdp

    sdp.init(timeout=60)
    me = sdp.rank()
    first, second = tf.Variable([1.0]), tf.Variable([1.0])
    constant = tf.constant([1.0])

    def gradients() -> Any:
        with tf.GradientTape() as tape:
            loss = (first if me else second) * 4.0
        return sdp.DistributedGradientTape(tape).gradient(loss, [first, constant, second])

    for how in (gradients, tf.function(gradients)):
        one, none, other = how()
        assert (float(one[0]), none, float(other[0])) == (2.0, None, 2.0)
    with tf.GradientTape() as tape:
        loss = first * 4.0
    zero = tf.UnconnectedGradients.ZERO
    tape = sdp.DistributedGradientTape(tape)
    assert float(tape.gradient(loss, constant, unconnected_gradients=zero)[0]) == 0.0
    optimizer = sdp.DistributedOptimizer(tf.keras.optimizers.SGD(1.0))
    optimizer.apply_gradients([(constant if me else None, first), (constant, second)])
    assert (float(first[0]), float(second[0])) == (0.5, 0.0)
    sdp.shutdown()


@jobs.BOTH_KERAS
def test_variables_that_one_rank_does_not_use(env: Any) -> None:
    jobs.run(unused, "2", env=env, timeout=120)


Pair = collections.namedtuple("Pair", ["first", "second"])


def sharded() -> None:
    import tensorflow as tf

    import smdistributed.dataparallel.tensorflow as sdp

    sdp.init(timeout=60)
    me, of = sdp.rank(), tf.data.Dataset.from_tensor_slices
    numbers = tf.range(7)
    for given, value in (
        (numbers, lambda one: int(one)),
        ((numbers, numbers * 2), lambda pair: int(pair[1]) // 2),
        ({"a": numbers}, lambda named: int(named["a"])),
        ((numbers,), lambda alone: int(alone[0])),
        (Pair(numbers, numbers * 2), lambda pair: int(pair.second) // 2),
    ):
        for known in (True, False):
            dataset = of(given)
            if not known:
                dataset = dataset.filter(lambda *_: True)
            mine = [value(one) for one in sdp.shard(dataset)]
            assert mine == [me, me + 2, me + 4], (mine, known)
            assert sdp.shard(dataset).element_spec == dataset.element_spec
            rest = [value(one) for one in sdp.shard(dataset, drop_remainder=False)]
            assert rest == list(range(me, 7, 2))
    with pytest.raises(TypeError, match=r"takes a tf.data.Dataset, and not a ndarray: make one by"):
        sdp.shard(np.arange(7))
    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    for wrong in (model, tf.Variable(1.0), tf.keras.Variable(1.0)):
        with pytest.raises(TypeError, match=r"takes a list, such as model.variables, and not a"):
            sdp.broadcast_variables(wrong, 0)
    endless = sdp.shard(of(numbers).repeat()).take(4)
    assert [int(one) for one in endless] == [(me + 2 * i) % 7 for i in range(4)]
    sdp.shutdown()


def test_shards_are_equally_long() -> None:
    jobs.run(sharded, "2", timeout=60)


def averaged_metrics() -> None:
    import tensorflow as tf

    import smdistributed.dataparallel.tensorflow as sdp

    sdp.init(timeout=60)
    logs = {"one": 1.0 + sdp.rank(), "classes": np.array([0.0, 2.0]) * sdp.rank()}
    sdp.AverageMetrics().on_epoch_end(0, logs)
    assert logs["one"] == 1.5
    assert isinstance(logs["one"], float)
    np.testing.assert_array_equal(logs["classes"], [0.0, 1.0])

    @tf.function
    def rows(x: Any) -> Any:
        return tf.ensure_shape(x, [None, 3]), sdp.allgather(x)

    # The number of ranks is known while a function is traced.
    assert rows.get_concrete_function(tf.ones((4, 3))).structured_outputs[1].shape == (2, 4, 3)
    sdp.shutdown()


def test_metrics_of_each_class_and_static_shapes() -> None:
    jobs.run(averaged_metrics, "2", timeout=60)


def values() -> None:
    import tensorflow as tf

    import smdistributed.dataparallel.tensorflow as sdp

    sdp.init(timeout=60)
    me, size, op = sdp.rank(), sdp.size(), sdp.ReduceOp
    assert (me, size) == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    ranks = range(size)
    integers = [tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8, tf.uint16, tf.uint32, tf.uint64]
    floats = [tf.float16, tf.bfloat16, tf.float32, tf.float64]

    def each(make: Any, kind: Any, call: Any, expected: Any) -> None:
        x = tf.cast(make(me), kind)
        for how in (call, tf.function(call)):
            result = how(x)
            assert result.dtype == kind
            assert np.array_equal(result.numpy(), tf.cast(expected, kind).numpy()), (kind, result)

    def made(rank: int) -> Any:
        return np.array([1 + rank, size - rank, 3])

    whole = np.stack([made(rank) for rank in ranks])
    for kind in integers + floats:
        each(made, kind, lambda x: sdp.allreduce(x, 0, 1, op=op.MIN), whole.min(0))
        each(made, kind, lambda x: sdp.allreduce(x, 0, 1, op=op.MAX), whole.max(0))
        each(made, kind, lambda x: sdp.allreduce(x, 0, 1, op=op.SUM), whole.sum(0))
    for kind in floats:
        each(made, kind, sdp.oob_allreduce, whole.mean(0))
    turned = whole * (1 + 2j)
    for kind in (tf.complex64, tf.complex128):
        each(
            lambda rank: turned[rank],
            kind,
            lambda x: sdp.allreduce(x, 0, 1, op=op.SUM),
            turned.sum(0),
        )
        each(lambda rank: turned[rank], kind, sdp.oob_allreduce, turned.mean(0))
        text = error_of(
            sdp.allreduce, tf.cast(turned[me], kind), 0, 1, sdp.Compression.none, op.MIN
        )
        assert "InvalidArgumentError" in text, text
        assert "MIN of complex" in text, text
        assert "is not supported; complex" in text, text
    bits = np.array([[rank == 0, True, False] for rank in ranks])
    each(lambda rank: bits[rank], tf.bool, lambda x: sdp.allreduce(x, 0, 1, op=op.MAX), bits.any(0))
    each(lambda rank: bits[rank], tf.bool, lambda x: sdp.allreduce(x, 0, 1, op=op.MIN), bits.all(0))
    for kind in [*integers, *floats, tf.complex64, tf.bool]:
        each(made, kind, lambda x: sdp.broadcast(x, size - 1), tf.cast(whole[-1], kind))
        each(made, kind, sdp.allgather, tf.cast(whole, kind))
    sdp.shutdown()


@pytest.mark.parametrize("layout", ["2", pytest.param("4", marks=pytest.mark.slow)])
def test_types_and_reductions(layout: str) -> None:
    jobs.run(values, layout, timeout=120)
