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
from jobs import error_of


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
