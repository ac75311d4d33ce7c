"""`smdistributed.dataparallel.tensorflow`: ranks train what one process trains."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import warnings
from typing import Any

import jobs
import numpy as np
import pytest

CLASSES, FEATURES, BATCH, STEPS = 3, 8, 24, 5
RATE, MOMENTUM = 0.1, 0.9


def data(count: int = BATCH * STEPS) -> tuple[np.ndarray, np.ndarray]:
    source = np.random.default_rng(0)
    x = source.normal(size=(count, FEATURES)).astype(np.float32)
    return x, source.integers(0, CLASSES, count)


# --- collectives ----------------------------------------------------------------------------------


def collectives() -> None:
    import tensorflow as tf

    import smdistributed.dataparallel.tensorflow as sdp

    with pytest.raises(ValueError, match="call init"):
        sdp.rank()
    sdp.init()
    with pytest.raises(ValueError, match="init\\(\\) called more than once"):
        sdp.init()
    me, size = sdp.rank(), sdp.size()
    assert sdp.local_rank() == int(os.environ["LOCAL_RANK"])
    assert sdp.local_size() == int(os.environ["LOCAL_WORLD_SIZE"])
    types = [tf.float32, tf.float64, tf.float16, tf.bfloat16, tf.int32, tf.int64, tf.uint8]
    for shape in ((), (0,), (7,), (3, 5), (100_000,)):
        for kind in types:
            count = int(np.prod(shape))
            each = [np.arange(count).reshape(shape) % 5 + rank for rank in range(size)]
            x = tf.cast(each[me], kind)
            total = tf.cast(sum(each), kind)

            def call(x: Any, root: int = size - 1) -> Any:
                return (
                    sdp.allreduce(x, 0, 2, op=sdp.ReduceOp.SUM),
                    sdp.allreduce(x, 1, 2, op=sdp.ReduceOp.MAX),
                    sdp.broadcast(x, root),
                    sdp.allgather(x),
                )

            for function in (call, tf.function(call)):
                summed, most, sent, gathered = function(x)
                for found, expected in (
                    (summed, total),
                    (most, tf.cast(each[-1], kind)),
                    (sent, tf.cast(each[-1], kind)),
                    (gathered, tf.stack([tf.cast(one, kind) for one in each])),
                ):
                    assert found.dtype == kind
                    assert found.shape == expected.shape
                    assert np.array_equal(found.numpy(), expected.numpy()), (shape, kind)
    mean = sdp.oob_allreduce(tf.constant([1.0, 2.0]) * (me + 1))
    np.testing.assert_allclose(mean, np.array([1.0, 2.0]) * (size + 1) / 2)
    counts = tf.constant([200, 2 * me + 1], tf.uint8)
    total = 200 * size % 256  # wraps
    for op, expected in (
        (sdp.ReduceOp.AVERAGE, [total // size, size]),
        (sdp.ReduceOp.SUM, [total, size * size]),
        (sdp.ReduceOp.MIN, [200, 1]),
        (sdp.ReduceOp.MAX, [200, 2 * size - 1]),
    ):
        for function in (sdp.oob_allreduce, tf.function(sdp.oob_allreduce)):
            assert function(counts, op=op).numpy().tolist() == expected
    mixed = [tf.Variable(3.0), tf.Variable(5.0, dtype=tf.float64)]

    def gradient() -> Any:
        with sdp.DistributedGradientTape(tf.GradientTape()) as tape:
            product = tf.cast(mixed[0], tf.float64) * mixed[1] * (me + 1)
        return tape.gradient(product, mixed)

    for function in (gradient, tf.function(gradient)):
        for found, variable, expected in zip(function(), mixed, (5.0, 3.0), strict=True):
            assert found.dtype == variable.dtype
            assert float(found) == expected * (size + 1) / 2
    half = sdp.oob_allreduce(tf.constant([1 / 3]), compression=sdp.Compression.fp16)
    assert half.dtype == tf.float32
    np.testing.assert_allclose(half, [1 / 3], rtol=1e-3)
    large = tf.constant([2.0**17 * (me + 1)], tf.bfloat16)  # float16 ends at 65504
    large = sdp.oob_allreduce(large, sdp.Compression.fp16, sdp.ReduceOp.MAX)
    assert large.dtype == tf.bfloat16
    assert float(large[0]) == 2.0**17 * sdp.size()
    assert sdp.overlap(mean) is mean
    variable = tf.Variable([float(me)])
    sdp.broadcast_variables([variable], 1)
    assert variable.numpy() == [1.0]
    for wrong, kind, text in (
        (lambda: sdp.allreduce(mean, 2, 2), ValueError, "param_index 2 is not in 0 to 1"),
        (lambda: sdp.allreduce(mean, 0, 1, op="sum"), ValueError, "is no ReduceOp"),
        (lambda: sdp.allreduce(mean, 0, 0), ValueError, "num_params is 0"),
        (
            lambda: sdp.DistributedOptimizer(tf.keras.optimizers.SGD(), compression="fp16"),
            ValueError,
            "compression is 'fp16': it has to be Compression.none or",
        ),
        (lambda: sdp.oob_allreduce(mean, op="sum"), ValueError, "is no ReduceOp"),
        (lambda: sdp.broadcast(mean, 9), ValueError, "root_rank 9 is no rank"),
        (lambda: sdp.DistributedOptimizer(3), TypeError, "is no optimizer of Keras"),
        (
            lambda: sdp.DistributedGradientTape(tf.GradientTape(), device_dense="/gpu:0"),
            ValueError,
            "device_dense is not supported",
        ),
    ):
        with pytest.raises(kind, match=text):
            wrong()
    sdp.shutdown()


@pytest.mark.parametrize("layout", ["2", pytest.param("2x2", marks=pytest.mark.slow)])
def test_values(layout: str) -> None:
    jobs.run(collectives, layout)


@pytest.mark.slow
def test_without_a_compiler(tmp_path: Any) -> None:
    """Operations run through numpy, and say so."""
    env = {"CXX": "/bin/false", "XDG_CACHE_HOME": str(tmp_path)}
    jobs.run(collectives_through_numpy, "2", env=env)


def collectives_through_numpy() -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        collectives()
    assert sum("has no operations for this TensorFlow" in str(one.message) for one in said) == 1


def numbered() -> None:
    import tensorflow as tf

    import smdistributed.dataparallel.tensorflow as sdp

    sdp.init()
    source = random.Random(sdp.rank())  # each rank builds its graph in another order
    x = tf.constant([1.0])
    for count in (1, 2, 7, 30):
        order = source.sample(range(count), count)

        @tf.function
        def step(x: Any, order: Any = order, count: int = count) -> Any:
            found = [
                (number, sdp.allreduce(x * (number + 1), number, count, op=sdp.ReduceOp.SUM))
                for number in order
            ]
            return [value for _, value in sorted(found, key=lambda pair: pair[0])]

        threads = []
        for _ in range(20):
            values = [float(value[0]) for value in step(x)]
            assert values == [2.0 * (number + 1) for number in range(count)]
            threads.append(len(os.listdir("/proc/self/task")))
        # At most one for each operation of a step, although those of many steps have waited.
        assert threads[-1] - threads[0] < count + 10, threads
    sdp.shutdown()


def test_numbers_give_the_order() -> None:
    jobs.run(numbered, "2")


# --- training -------------------------------------------------------------------------------------


def layers(tf: Any) -> Any:
    tf.keras.utils.set_random_seed(5)
    return [
        tf.Variable(tf.random.normal((10, 4)), name="embedding"),
        tf.Variable(tf.random.normal((FEATURES + 4, 16)) / 3, name="one"),
        tf.Variable(tf.zeros(16), name="bias"),
        tf.Variable(tf.random.normal((16, CLASSES)) / 3, name="two"),
        tf.Variable(tf.zeros(3), name="unused"),
    ]


def train(tf: Any, tape_of: Any, begin: int, stride: int, compiled: bool) -> Any:
    """Trains on every `stride`th example; returns losses and values."""
    variables = layers(tf)
    embedding, one, bias, two, _ = variables
    x, y = data()
    momenta = [tf.Variable(tf.zeros_like(variable)) for variable in variables]

    def step(images: Any, words: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            features = tf.concat([images, tf.gather(embedding, words)], 1)
            hidden = tf.nn.relu(features @ one + bias)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, hidden @ two)
            loss = tf.reduce_mean(losses)
        gradients = tape_of(tape).gradient(loss, variables)
        for variable, momentum, gradient in zip(variables, momenta, gradients, strict=True):
            if gradient is not None:
                momentum.assign(MOMENTUM * momentum + tf.convert_to_tensor(gradient))
                variable.assign_sub(RATE * momentum)
        return loss

    run = tf.function(step) if compiled else step
    found = []
    for number in range(STEPS):
        rows = slice(number * BATCH + begin, (number + 1) * BATCH, stride)
        words = np.arange(number * BATCH, (number + 1) * BATCH)[begin::stride] % 10
        found.append(float(run(tf.constant(x[rows]), tf.constant(words), tf.constant(y[rows]))))
    return found, [variable.numpy() for variable in variables]


def on_ranks(compiled: bool) -> Any:
    import tensorflow as tf

    import smdistributed.dataparallel.tensorflow as sdp

    sdp.init()
    result = train(tf, sdp.DistributedGradientTape, sdp.rank(), sdp.size(), compiled)
    losses = [float(sdp.oob_allreduce(tf.constant(loss))) for loss in result[0]]
    sdp.shutdown()
    return losses, result[1]


def alone() -> Any:
    import tensorflow as tf

    return train(tf, lambda tape: tape, 0, 1, True)


@pytest.mark.parametrize(
    ("layout", "compiled"),
    [
        ("2", False),
        pytest.param("4", True, marks=pytest.mark.slow),
        pytest.param("2x2", True, marks=pytest.mark.slow),
    ],
)
def test_a_tape_trains_what_one_process_trains(layout: str, compiled: bool) -> None:
    ((losses, values),) = jobs.run(alone, "1")
    for found_losses, found in jobs.run(on_ranks, layout, compiled):
        np.testing.assert_allclose(found_losses, losses, rtol=1e-5)
        for one, other in zip(found, values, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def script(distributed: bool) -> Any:
    """What AWS's public example for MNIST does; without dropout, since masks differ by rank."""
    import tensorflow as tf
    from sklearn.datasets import load_digits

    if distributed:
        import smdistributed.dataparallel.tensorflow as sdp

        sdp.init()
    digits, keras = load_digits(), tf.keras
    # In float32, ranks and one process differ by 3e-4 in the loss after 20 steps and by 5e-3 in the
    # weights; in float64 by 3e-16: so that is rounding, and no other computation. Probably Adam
    # enlarges it: it divides each gradient by its own size, also where a sum is nearly zero.
    keras.backend.set_floatx("float64")
    dataset = tf.data.Dataset.from_tensor_slices((digits.images[..., None] / 16, digits.target))
    if distributed:
        dataset = dataset.shard(sdp.size(), sdp.rank()).batch(64 // sdp.size())
    else:
        dataset = dataset.batch(64)
    keras.utils.set_random_seed(42)
    layer = keras.layers
    model = keras.Sequential(
        [
            layer.Conv2D(32, [3, 3], activation="relu"),
            layer.Conv2D(64, [3, 3], activation="relu"),
            layer.MaxPooling2D(pool_size=(2, 2)),
            layer.Flatten(),
            layer.Dense(128, activation="relu"),
            layer.Dense(10, activation="softmax"),
        ]
    )
    loss_object = keras.losses.SparseCategoricalCrossentropy()
    optimizer = keras.optimizers.Adam(0.001)

    @tf.function
    def training_step(images: Any, labels: Any, first_batch: bool) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_object(labels, model(images, training=True))
        if distributed:
            tape = sdp.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        if distributed and first_batch:
            sdp.broadcast_variables(model.variables, root_rank=0)
            variables = optimizer.variables
            sdp.broadcast_variables(variables() if callable(variables) else variables, root_rank=0)
        return sdp.oob_allreduce(loss) if distributed else loss

    losses = [
        float(training_step(images, labels, number == 0))
        for number, (images, labels) in enumerate(dataset.take(20))
    ]
    values = [variable.numpy() for variable in model.trainable_variables]
    if distributed:
        sdp.shutdown()
    return losses, values


LAYOUTS = pytest.mark.parametrize(
    "layout", ["2", *(pytest.param(one, marks=pytest.mark.slow) for one in ("4", "2x2"))]
)


@jobs.BOTH_KERAS
@LAYOUTS
def test_the_mnist_script(layout: str, env: Any) -> None:
    ((losses, values),) = jobs.run(script, "1", False, env=env)
    assert losses[-1] < losses[0]
    for found_losses, found in jobs.run(script, layout, True, env=env):
        np.testing.assert_allclose(found_losses, losses, rtol=1e-9)
        for one, other in zip(found, values, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9)


def fitted(distributed: bool) -> Any:
    import tensorflow as tf

    if distributed:
        import smdistributed.dataparallel.tensorflow as sdp

        sdp.init()
    # Ranks begin with other values than rank 0, until they get its values.
    rank = int(os.environ["RANK"])
    tf.keras.utils.set_random_seed(5)
    dense = tf.keras.layers.Dense
    model = tf.keras.Sequential([dense(16, activation="relu"), dense(CLASSES)])
    model.build((None, FEATURES))
    optimizer = tf.keras.optimizers.SGD(RATE, momentum=MOMENTUM)
    dataset = tf.data.Dataset.from_tensor_slices(data())
    callbacks, batch = [], BATCH
    if distributed:
        for variable in model.trainable_variables:
            variable.assign(variable * (1 + rank))
        sdp.broadcast_variables(model.variables, 0)
        optimizer = sdp.DistributedOptimizer(optimizer, bucket_cap_mb=1)
        with pytest.raises(ValueError, match="is a DistributedOptimizer already"):
            sdp.DistributedOptimizer(optimizer)
        dataset, batch = sdp.shard(dataset), BATCH // sdp.size()
        callbacks = [sdp.BroadcastVariables(0), sdp.AverageMetrics()]
    model.compile(
        optimizer=optimizer,
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    history = model.fit(dataset.batch(batch), epochs=3, verbose=0, callbacks=callbacks).history
    values = [variable.numpy() for variable in model.trainable_variables]
    if distributed:
        sdp.shutdown()
    return history, values


@jobs.BOTH_KERAS
@LAYOUTS
def test_keras_fits_what_one_process_fits(layout: str, env: Any) -> None:
    ((history, values),) = jobs.run(fitted, "1", False, env=env)
    for found_history, found in jobs.run(fitted, layout, True, env=env):
        for name, expected in history.items():
            np.testing.assert_allclose(found_history[name], expected, rtol=1e-5)
        for one, other in zip(found, values, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def broadcast_by_a_callback() -> Any:
    """Returns the variables before and after the callback, in each of two batches."""
    import tensorflow as tf

    import smdistributed.dataparallel.tensorflow as sdp

    sdp.init(port=int(os.environ["STORE"]))
    me = sdp.rank()
    tf.keras.utils.set_random_seed(5 + me)
    model = tf.keras.Sequential([tf.keras.layers.Dense(CLASSES)])
    optimizer = tf.keras.optimizers.SGD(RATE, momentum=MOMENTUM)  # each rank trains alone
    model.compile(
        optimizer, tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True), run_eagerly=True
    )
    found: list[list[Any]] = []

    def note() -> None:
        values = optimizer.variables() if callable(optimizer.variables) else optimizer.variables
        found.append([np.array(one) for one in [*model.variables, *values]])

    class Notes(tf.keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            note()

    x, y = data(2 * BATCH)
    rows = slice(me, None, 2)
    callbacks = [Notes(), sdp.BroadcastVariables(1), Notes()]
    model.fit(x[rows], y[rows], batch_size=BATCH // 2, verbose=0, callbacks=callbacks)
    sdp.shutdown()
    return found


def differ(one: list[Any], other: list[Any]) -> bool:
    return any(np.any(a != b) for a, b in zip(one, other, strict=True))


@jobs.BOTH_KERAS
def test_the_callback_gives_all_ranks_the_variables_of_one(env: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    first, second = jobs.run(broadcast_by_a_callback, "2", env={**env, "STORE": str(port)})
    assert len(first) == len(second) == 4
    assert len(first[0]) >= 4  # also momenta
    assert differ(first[0][:2], second[0][:2])
    assert differ(first[0][-2:], second[0][-2:])
    assert not differ(second[1], second[0])
    assert not differ(first[1], second[0])
    # It acts once.
    assert differ(first[2], second[2])
    assert not differ(first[3], first[2])


# --- errors ---------------------------------------------------------------------------------------


def wrong(how: str) -> str:
    import tensorflow as tf

    import smdistributed.dataparallel.tensorflow as sdp

    sdp.init(timeout=20)
    x = tf.ones(10)
    function = tf.function(lambda x: sdp.oob_allreduce(x))
    function(x)
    try:
        if how == "shape":
            function(x if sdp.rank() else x[:5])
        elif how == "killed":
            if sdp.rank():
                os.kill(os.getpid(), signal.SIGKILL)
            began = time.monotonic()
            function(x)
        else:
            began = time.monotonic()
            tf.function(lambda x: sdp.allreduce(x, 1, 2))(x)
    except tf.errors.OpError as error:
        return f"{type(error).__name__}: {error.message}"
    return f"nothing after {time.monotonic() - began} s"


@pytest.mark.slow
def test_errors_name_the_rank_or_the_number() -> None:
    for text in jobs.run(wrong, "2", "shape"):
        # The rank that is blamed has its process in brackets.
        assert re.search(r"rank 0[^:]* is in allreduce of 5 float32", text), text
        assert re.search(r"rank 1[^:]* is in allreduce of 10 float32", text), text
        assert "smddp: smddp:" not in text
    survivor, none = jobs.run(wrong, "2", "killed")
    assert none is None
    assert "rank 1" in survivor
    assert "its process died" in survivor or "is gone" in survivor, survivor
    for text in jobs.run(wrong, "2", "number", timeout=60):
        assert text.startswith("DeadlineExceededError")
        assert "number 0 of 2 has not come, which has to go before number 1" in text


def versions() -> None:
    from smddp.tensorflow.versions import check

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check("2.16.2")
        check("2.21.0-rc1")
    for other in ("1.15.5", "2.15.1", "2.22.0", "3.0.0"):
        text = f"is tested with TensorFlow 2.16 to 2.21, and this is {other}"
        with pytest.warns(RuntimeWarning, match=text):
            check(other)


def test_other_versions_are_named() -> None:
    jobs.run(versions, "1")


def test_the_launcher_says_that_it_needs_torch() -> None:
    command = [sys.executable, "-m", "smddp.launch", "-n", "2", __file__]
    done = subprocess.run(command, cwd=jobs.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "torch is not installed: `pip install torch`, or start them by mpirun" in done.stderr
