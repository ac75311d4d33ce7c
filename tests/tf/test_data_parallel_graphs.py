"""Data parallelism in graphs: constants, several functions, gradients, nesting, TensorFlow 1."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import jobs
import numpy as np
import pytest
from jobs import error_of


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
