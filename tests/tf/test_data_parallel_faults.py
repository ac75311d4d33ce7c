"""`smdistributed.dataparallel.tensorflow`: what goes wrong is said, and ends on all ranks."""

from __future__ import annotations

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


def error_of(call: Any, *args: Any) -> str:
    """Returns class and text of the error that a call raises."""
    try:
        call(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


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

    for _ in range(3):
        assert [float(one[0]) for one in folded()] == [ranks] * 3
        assert float(dropped(tf.constant([me + 1.0]))[0]) == ranks
        assert linear().numpy().tolist() == [ranks, ranks]
    for number in (1, 0):
        found = error_of(sdp.allreduce, tf.ones(2), number, 2)
        assert ("it is not the turn of number 1 of 2" in found) == (number == 1), found
    sdp.allreduce(tf.ones(2), 1, 2)
    sdp.shutdown()


def test_constants_and_unused_sums_are_reduced() -> None:
    jobs.run(constants, "2", timeout=120)


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
    sdp.shutdown()


@pytest.mark.parametrize(
    "compiler", ["c++", pytest.param("/bin/false", marks=pytest.mark.slow)], ids=["c++", "none"]
)
def test_collectives_have_gradients(compiler: str, tmp_path: Path) -> None:
    env = {} if compiler == "c++" else {"CXX": compiler, "XDG_CACHE_HOME": str(tmp_path)}
    jobs.run(differentiated, "2", env=env, timeout=120)


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
    function = tf.function(lambda x: sdp.allreduce(x, 1, 2) + sdp.allreduce(x, 0, 2))
    eager = sdp.oob_allreduce
    function(tf.ones(2)), eager(tf.ones(2))
    if sdp.rank() == 1:
        time.sleep(6)
        with contextlib.suppress(tf.errors.OpError):
            eager(tf.ones(2))
        return None
    sent: list[float] = []

    def send() -> None:
        time.sleep(1)
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=send).start()
    with pytest.raises(KeyboardInterrupt):
        (function if how == "graph" else eager)(tf.ones(2))
    if how == "fd":
        assert signal.SIGINT in os.read(reader, 10)
    return time.monotonic() - sent[0]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["graph", "eager", "fd", "none"])
def test_ctrl_c_ends_a_wait(how: str, tmp_path: Path) -> None:
    env = {} if how != "none" else {"CXX": "/bin/false", "XDG_CACHE_HOME": str(tmp_path)}
    seconds, _ = jobs.run(interrupted, "2", how, env=env, timeout=120)
    assert seconds < 5, seconds


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
    from smddp_tensorflow import kernels

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


def unwritable(folder: str) -> str:
    import tempfile

    from smddp_tensorflow import kernels

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
