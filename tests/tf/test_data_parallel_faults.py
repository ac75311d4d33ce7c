"""`smdistributed.dataparallel.tensorflow`: what goes wrong is said, and ends on all ranks."""

from __future__ import annotations

import collections
import contextlib
import os
import signal
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import jobs
import numpy as np
import pytest
from jobs import error_of

# --- graphs ---------------------------------------------------------------------------------------


def constants() -> None:
    import tensorflow as tf

    import smdistributed.dataparallel.tensorflow as sdp

    sdp.init(timeout=60)
    me, size = sdp.rank(), sdp.size()
    ranks = size * (size + 1) / 2

    @tf.function
    def folded() -> Any:
        # TensorFlow could compute all of it beforehand, and the first two are one operation to it.
        x = tf.constant([me + 1.0])
        return [sdp.allreduce(x, number, 3, op=sdp.ReduceOp.SUM) for number in range(3)]

    @tf.function
    def dropped(x: Any) -> Any:
        sdp.allreduce(x, 0, 2)
        return sdp.allreduce(x, 1, 2, op=sdp.ReduceOp.SUM)

    weight = tf.Variable([1.0, 1.0])

    @tf.function
    def linear() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight * (me + 1.0))
        (gradient,) = tape.gradient(loss, [weight])
        return sdp.allreduce(gradient, 0, 1, op=sdp.ReduceOp.SUM)

    from smddp.tensorflow import job

    operations = job.operations()
    assert operations is not None
    begun = operations.kernels.library.smddp_kernels_begun
    for _ in range(3):
        before = begun()
        assert [float(one[0]) for one in folded()] == [ranks] * 3
        assert begun() - before == 3
        assert float(dropped(tf.constant([me + 1.0]))[0]) == ranks
        assert begun() - before == 5
        assert linear().numpy().tolist() == [ranks, ranks]
        assert begun() - before == 6
    for number in (1, 0):
        found = error_of(sdp.allreduce, tf.ones(2), number, 2)
        assert ("it is not the turn of number 1 of 2" in found) == (number == 1), found
    sdp.allreduce(tf.ones(2), 1, 2)
    sdp.shutdown()


def test_constants_and_unused_sums_are_reduced() -> None:
    jobs.run(constants, "2", timeout=120)


def several() -> None:
    import tensorflow as tf

    import smdistributed.dataparallel.tensorflow as sdp

    sdp.init(timeout=20)
    me, size = sdp.rank(), sdp.size()

    def late(x: Any, on: int) -> Any:
        """What a rank computes slowly comes after what it computes fast, if nothing orders them."""

        def wait(x: Any) -> Any:
            time.sleep(0.3 * (me == on))
            return x

        return tf.ensure_shape(tf.py_function(wait, [x], x.dtype), x.shape)

    def reduced(x: Any, count: int, order: Any = None) -> Any:
        found = {
            number: sdp.allreduce(x + number, number, count, op=sdp.ReduceOp.SUM)
            for number in order or range(count)
        }
        return [found[number] for number in range(count)]

    def both(x: Any) -> Any:
        return reduced(late(x, 0), 2, (1, 0)), reduced(late(x + 10.0, 1), 2)

    def of_two_sizes(x: Any) -> Any:
        return reduced(late(x, 0), 2), reduced(late(x + 10.0, 1), 3), reduced(x + 20.0, 2)

    variables = [tf.Variable(0.0), tf.Variable(10.0)]
    first = tf.function(lambda x: reduced(late(x + variables[0], 0), 2))
    second = tf.function(lambda x: reduced(late(x + variables[1], 1), 2))

    def nested(x: Any) -> Any:
        return first(x), second(x)

    for function in (both, of_two_sizes, nested):
        compiled = tf.function(function)
        for _ in range(3):
            for ten, values in enumerate(compiled(tf.constant(float(me)))):
                for number, value in enumerate(values):
                    expected = sum(range(size)) + size * (10 * ten + number)
                    assert float(value) == expected, (function.__name__, ten, number, float(value))

    mixed = tf.function(lambda x: [sdp.allreduce(x, number, 3) for number in (0, 2, 0)])
    found = error_of(mixed, tf.ones(2))
    assert "ValueError" in found, found
    assert "number 0 of 3 comes in a tf.function before number(s) [1] of 3" in found, found
    mixed = tf.function(lambda x: [sdp.allreduce(x, 0, count) for count in (2, 3)])
    found = error_of(mixed, tf.ones(2))
    assert "number 0 of 3 comes in a tf.function before number(s) [1] of 2" in found, found
    assert float(sdp.allreduce(tf.constant(3.0), 0, 1)) == 3
    sdp.shutdown()


def test_several_sets_of_numbers_in_a_function() -> None:
    jobs.run(several, "2", timeout=120)


def outlived() -> None:
    import tensorflow as tf

    import smdistributed.dataparallel.tensorflow as sdp

    sdp.init(timeout=60)
    old = tf.function(lambda x: sdp.oob_allreduce(x) + sdp.allreduce(x, 0, 1))
    late = tf.function(lambda x: sdp.oob_allreduce(x)).get_concrete_function(tf.ones(2))
    old(tf.ones(2))
    sdp.allreduce(tf.ones(2), 0, 2)  # the step is not completed
    sdp.shutdown()
    sdp.init(timeout=60)
    step = tf.function(lambda x: [sdp.allreduce(x, number, 2) for number in (1, 0)])
    for _ in range(2):
        assert [float(one) for one in step(tf.constant(3.0))] == [3.0, 3.0]
    for function in (old, late):
        assert "this rank has left the job" in error_of(function, tf.ones(2))
    sdp.shutdown()


def test_functions_outlive_a_job() -> None:
    jobs.run(outlived, "2", timeout=120)


def differentiated() -> None:
    import tensorflow as tf

    import smdistributed.dataparallel.tensorflow as sdp

    sdp.init(timeout=60)
    me, size = sdp.rank(), sdp.size()
    x = tf.Variable([1.0, 2.0])

    def of(call: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(call(x * 1.0) * (me + 1.0))
        return tape.gradient(loss, x)

    total = size * (size + 1) / 2
    for how in (lambda call: of(call), tf.function(of)):
        mean = how(sdp.oob_allreduce)
        np.testing.assert_allclose(mean, [total / size] * 2)
        np.testing.assert_allclose(how(sdp.allgather), [total] * 2)
        sent = how(lambda y: sdp.broadcast(y, 1))
        np.testing.assert_allclose(sent, [total * (me == 1)] * 2)
        found = error_of(how, lambda y: sdp.allreduce(y, 0, 1))
        assert "allreduce has no gradient" in found, found

    def repeated(y: Any) -> Any:
        for call in (sdp.oob_allreduce, lambda z: sdp.broadcast(z, 1), sdp.allgather):
            for _ in tf.range(2):
                y = tf.reshape(call(y), [-1, 2])[-1] * 3.0
        return y

    # Sums: of averages, of broadcasts from 1, and of the last rows, which are rank 1's.
    np.testing.assert_allclose(of(repeated), tf.function(of)(repeated))
    np.testing.assert_allclose(tf.function(of)(repeated), [0.5 * 3**6 * total] * 2)
    sdp.shutdown()


@pytest.mark.parametrize(
    "compiler", ["c++", pytest.param("/bin/false", marks=pytest.mark.slow)], ids=["c++", "none"]
)
def test_collectives_have_gradients(compiler: str, tmp_path: Path) -> None:
    env = {} if compiler == "c++" else {"CXX": compiler, "XDG_CACHE_HOME": str(tmp_path)}
    jobs.run(differentiated, "2", env=env, timeout=120)


def nested() -> None:
    import tensorflow as tf

    import smdistributed.dataparallel.tensorflow as sdp

    sdp.init(timeout=60)
    me, size = sdp.rank(), sdp.size()
    variable = tf.Variable([1.0, 2.0, 3.0])

    def late(x: Any) -> Any:
        time.sleep(0.3 * me)
        return x

    @tf.function
    def inner() -> Any:
        value = tf.ensure_shape(tf.py_function(late, [variable * 1.0], tf.float32), [3])
        return sdp.oob_allreduce(value)

    other = tf.Variable(1.0)

    @tf.function
    def outer(flag: Any) -> Any:
        first = inner()  # one variable
        second = sdp.oob_allreduce(tf.constant([me + 1.0]))  # none
        third = tf.cond(flag, lambda: sdp.broadcast(other * (me + 1.0), 1), lambda: other * 1.0)
        return first, second, third, sdp.allgather(tf.constant([[me]]))

    for flag in (True, False):
        first, second, third, fourth = outer(tf.constant(flag))
        assert first.numpy().tolist() == [1, 2, 3]
        assert float(second[0]) == (size + 1) / 2
        assert float(third) == (2 if flag else 1)
        assert fourth.numpy().ravel().tolist() == list(range(size))
    sdp.shutdown()


@pytest.mark.parametrize(
    "compiler", ["c++", pytest.param("/bin/false", marks=pytest.mark.slow)], ids=["c++", "none"]
)
def test_nested_functions_keep_the_order_of_the_program(compiler: str, tmp_path: Path) -> None:
    env = {} if compiler == "c++" else {"CXX": compiler, "XDG_CACHE_HOME": str(tmp_path)}
    jobs.run(nested, "2", env=env, timeout=120)


# --- failures -------------------------------------------------------------------------------------


def cancelled() -> tuple[str, float, str]:
    import tensorflow as tf

    import smdistributed.dataparallel.tensorflow as sdp

    sdp.init(timeout=100)
    fails = sdp.rank() == 0

    def fail(x: Any) -> Any:
        time.sleep(0.3)
        if fails:
            raise ValueError("this rank only")
        return x

    @tf.function
    def step(x: Any) -> Any:
        last = sdp.allreduce(x, 1, 2)
        return last, sdp.allreduce(
            tf.ensure_shape(tf.numpy_function(fail, [x], x.dtype), [2]), 0, 2
        )

    began = time.monotonic()
    first = error_of(step, tf.ones(2))
    took = time.monotonic() - began
    again = error_of(tf.function(lambda x: sdp.allreduce(x, 0, 2)), tf.ones(2))
    # What the program orders goes on.
    assert float(sdp.oob_allreduce(tf.constant(2.0))) == 2
    sdp.shutdown()
    return first, took, again


def test_a_failure_ends_what_waits_for_it() -> None:
    (first, one, again), (second, other, later) = jobs.run(cancelled, "2", timeout=120)
    assert "this rank only" in first, first
    assert "number 0 of 2 has not come" in second, second
    assert max(one, other) < 50
    for text in (again, later):
        assert "number 0 of 2 has not come" in text, text


def interrupted(how: str) -> float | None:
    import tensorflow as tf

    import smdistributed.dataparallel.tensorflow as sdp

    reader, writer = os.pipe()
    if how == "fd":  # of somebody else, who gets the signals, too
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sdp.init(timeout=100)
    order = (0, 1) if how == "none" else (1, 0)
    function = tf.function(lambda x: [sdp.allreduce(x, number, 2) for number in order])
    eager = sdp.oob_allreduce
    function(tf.ones(2)), eager(tf.ones(2))
    if sdp.rank() == 1:
        time.sleep(6)
        with contextlib.suppress(Exception):
            eager(tf.ones(2))
        return None
    sent: list[float] = []

    def send() -> None:
        time.sleep(1)
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=send).start()
    assert error_of(eager if how == "eager" else function, tf.ones(2)) == "KeyboardInterrupt: "
    if how == "fd":
        assert signal.SIGINT in os.read(reader, 10)
    return time.monotonic() - sent[0]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["graph", "eager", "fd", "none"])
def test_ctrl_c_ends_a_wait(how: str, tmp_path: Path) -> None:
    env = {} if how != "none" else {"CXX": "/bin/false", "XDG_CACHE_HOME": str(tmp_path)}
    seconds, _ = jobs.run(interrupted, "2", how, env=env, timeout=120)
    assert seconds < 5, seconds


def left_on_another_thread() -> None:
    import smdistributed.dataparallel.tensorflow as sdp

    sdp.init(timeout=100)
    thread = threading.Thread(target=sdp.shutdown)
    thread.start()
    thread.join()
    assert not sdp.is_initialized()
    # Python still writes numbers of signals to the descriptor of before: it must be no other file.
    pipes = [os.pipe() for _ in range(20)]
    signal.signal(signal.SIGUSR1, lambda *_: None)
    os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(0.2)
    for reader, _ in pipes:
        os.set_blocking(reader, False)
        with pytest.raises(BlockingIOError):
            os.read(reader, 10)
    from smddp.tensorflow import job

    real = job.operations
    job.operations = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        sdp.init(timeout=100)
    job.operations = real
    sdp.init(timeout=100)
    sdp.shutdown()


def test_a_job_ends_on_any_thread_and_after_an_error() -> None:
    jobs.run(left_on_another_thread, "1", timeout=120)


def unbuilt() -> None:
    import tensorflow as tf

    import smdistributed.dataparallel.tensorflow as sdp

    sdp.init(timeout=60)
    optimizer = sdp.DistributedOptimizer(tf.keras.optimizers.SGD(0.1))
    variables = [tf.keras.Variable([1.0]), tf.keras.Variable([2.0])]
    gradients = [tf.constant([1.0]), tf.constant([1.0])]
    with pytest.raises(ValueError, match="must already be built"):
        optimizer.apply(gradients)
    optimizer.build(variables)
    with pytest.raises(ValueError, match="must match"):
        optimizer.apply(gradients[:1])
    optimizer.apply(gradients)
    np.testing.assert_allclose(variables[1].numpy(), [1.9])
    sdp.shutdown()


def test_gradients_without_a_variable_each() -> None:
    jobs.run(unbuilt, "1", timeout=120)


def measured() -> None:
    import smdistributed.dataparallel.tensorflow as sdp

    sdp.init(timeout=100)
    me = sdp.rank()
    average = sdp.AverageMetrics().on_epoch_end
    logs: dict[str, Any] = {"loss": float(me), "f1": np.array([1.0, 3.0]) * me}
    average(0, logs)
    assert logs.pop("loss") == 0.5
    assert logs.pop("f1").tolist() == [0.5, 1.5]
    average(1, logs)
    average(2, None)
    other = {"val_loss": 1.0} if me else {}
    with pytest.raises(ValueError, match=rf"rank {me} has the metrics .* rank\(s\) \[{1 - me}\]"):
        average(3, {"loss": 1.0, **other})
    sdp.shutdown()


def test_metrics_that_differ_between_ranks() -> None:
    jobs.run(measured, "2", timeout=120)


def killed() -> float | None:
    import tensorflow as tf

    import smdistributed.dataparallel.tensorflow as sdp

    sdp.init(timeout=100)
    function = tf.function(lambda x: sdp.oob_allreduce(x))
    times = np.zeros(1)
    function(tf.ones(10))
    if sdp.rank():
        times[0] = time.monotonic()
        sdp.broadcast(tf.constant(times), 1)
        time.sleep(0.5)
        (Path(os.environ["SHARED"]) / "killed").write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    sdp.broadcast(tf.constant(times), 1)
    found = error_of(function, tf.ones(10))
    ended = time.monotonic()
    assert "rank 1" in found, found
    return ended - float((Path(os.environ["SHARED"]) / "killed").read_text())


@pytest.mark.slow
def test_a_killed_rank_is_named_at_once(tmp_path: Path) -> None:
    found = []
    for number in range(5):
        folder = tmp_path / str(number)
        folder.mkdir()
        found.append(jobs.run(killed, "2", env={"SHARED": str(folder)}, timeout=120)[0])
    print(f"milliseconds: {[round(1000 * one, 1) for one in found]}")
    assert statistics.median(found) < 1


# --- compilation ----------------------------------------------------------------------------------


def one_without() -> None:
    import tensorflow as tf

    import smdistributed.dataparallel.tensorflow as sdp

    if os.environ["RANK"] == "1":
        os.environ |= {"CXX": "/bin/false", "XDG_CACHE_HOME": os.environ["EMPTY"]}
    text = r"has no operations|rank\(s\) \[1\] have no operations"
    with pytest.warns(RuntimeWarning, match=text):
        sdp.init(timeout=60)
    assert float(sdp.allreduce(tf.constant(2.0), 0, 1)) == 2
    found = error_of(sdp.allreduce, tf.ones(2), 1, 2)
    assert "it is not the turn of number 1 of 2" in found, found
    sdp.shutdown()


def test_a_host_without_compiler(tmp_path: Path) -> None:
    """All ranks do what it can."""
    jobs.run(one_without, "2", env={"EMPTY": str(tmp_path)}, timeout=120)


def compiled() -> None:
    from smddp.tensorflow import kernels

    calls = Path(os.environ["XDG_CACHE_HOME"]).parent / "calls"
    real = kernels._compile

    def counted(compiler: str, target: Path) -> None:
        with open(calls, "a") as file:
            file.write("x")
        time.sleep(1)
        assert compiler
        target.write_bytes(b"no library")

    kernels._compile = counted
    with pytest.warns(RuntimeWarning, match="has no operations"):
        kernels.load()
    assert real


def test_one_rank_of_a_host_compiles(tmp_path: Path) -> None:
    jobs.run(compiled, "3", env={"XDG_CACHE_HOME": str(tmp_path / "cache")}, timeout=60)
    assert (tmp_path / "calls").read_text() == "x"


def with_a_library_that_does_not_load() -> None:
    from smddp.tensorflow import kernels

    found = kernels.load()
    assert found is not None
    folder = Path(os.environ["EMPTY"])
    os.environ["XDG_CACHE_HOME"] = str(folder)
    broken = folder / "smddp" / Path(found.library._name).name
    broken.parent.mkdir()
    broken.write_bytes(b"no library")
    compiled = []
    kernels._compile = lambda *given: compiled.append(given)
    with pytest.warns(RuntimeWarning, match="has no operations"):
        assert kernels.load.__wrapped__() is None
    ((_, target),) = compiled
    assert target == broken


def test_a_library_that_does_not_load_is_made_again(tmp_path: Path) -> None:
    jobs.run(with_a_library_that_does_not_load, "1", env={"EMPTY": str(tmp_path)}, timeout=120)


def remade() -> list[str]:
    from smddp.tensorflow import kernels

    found = kernels.load()
    assert found is not None
    os.environ["XDG_CACHE_HOME"] = os.environ["EMPTY"]
    kernels._compile = lambda _, target: target.write_bytes(Path(found.library._name).read_bytes())
    made = kernels._compiled()
    return sorted(place.name for place in Path(made.library._name).parent.iterdir())


def test_old_libraries_are_removed(tmp_path: Path) -> None:
    folder, now = tmp_path / "smddp", time.time()
    folder.mkdir(mode=0o700)
    for days in range(12):
        place = folder / f"tensorflow_2.16.1_{days:x}.so"
        place.touch()
        os.utime(place, (now - 86400 * (days + 0.5),) * 2)
    jobs.run(remade, "1", env={"EMPTY": str(tmp_path)}, timeout=120)
    left = {place.name for place in folder.iterdir()}
    assert {"lock", *(f"tensorflow_2.16.1_{days:x}.so" for days in range(7))} < left
    assert len(left) == 9, left
    # What was used within a day stays, however many there are.
    for place in folder.glob("*.so"):
        place.unlink()
    for number in range(12):
        (folder / f"tensorflow_2.16.1_{number:x}.so").touch()
    (names,) = jobs.run(remade, "1", env={"EMPTY": str(tmp_path)}, timeout=120)
    assert len(names) == 14, names


def unwritable(folder: str) -> str:
    import tempfile

    from smddp.tensorflow import kernels

    tempfile.tempdir = folder
    return str(kernels._cache())


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (found,) = jobs.run(
        unwritable, "1", str(tmp_path), env={"XDG_CACHE_HOME": str(tmp_path / "file")}
    )
    place = Path(found)
    assert place == tmp_path / f"smddp-{os.getuid()}"
    assert place.stat().st_mode & 0o777 == 0o700


# --- training -------------------------------------------------------------------------------------


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


def old_graph() -> None:
    import tensorflow as tf

    import smdistributed.dataparallel.tensorflow as sdp

    sdp.init(timeout=60)
    me = sdp.rank()
    v1 = tf.compat.v1
    with pytest.raises(RuntimeError, match="eager code has no global variables"):
        sdp.broadcast_global_variables(0)
    with tf.Graph().as_default():
        values = [v1.get_variable(f"v{i}", initializer=float(me * 10 + i)) for i in range(6)]
        send = sdp.broadcast_global_variables(1)
        assert send is not None
        hook = sdp.BroadcastGlobalVariablesHook(0)
        hook.begin()
        from smddp.tensorflow.gradients import averaged

        given = [value * 1.0 for value in values]
        means = averaged(given, values, bucket_cap_mb=1e-6)
        # Otherwise TensorFlow may run them in another order on each rank.
        found = [one.op for one in means]
        for former, later in zip(found[1:], found, strict=False):
            assert former in later.control_inputs
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            assert session.run(means) == [5.0 + i for i in range(6)]
            session.run(send)
            assert session.run(values) == [10.0 + i for i in range(6)]
            for value in values:
                value.load(float(me), session)
            hook.after_create_session(session, None)
            assert session.run(values) == [0.0] * 6
    sdp.shutdown()


def test_graphs_of_tensorflow_1() -> None:
    jobs.run(old_graph, "2", timeout=120)


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


# --- values ---------------------------------------------------------------------------------------


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
