"""`smdistributed.modelparallel.tensorflow`: arguments, results and failures of a step."""

from __future__ import annotations

import time
import types
from pathlib import Path
from typing import Any

import jobs
import numpy as np
from jobs import error_of
from test_model_parallel_faults import TWO, model_of


def begun(smp: Any, tf: Any, **config: Any) -> tuple[Any, Any]:
    """Begins a job; returns a model that has run, and a batch for it."""
    model = model_of(smp, tf, **config)
    x = tf.reshape(tf.range(24.0), (8, 3))
    smp.step(lambda rows: model(rows))(x)
    return model, x


# --- one rank fails -------------------------------------------------------------------------------


def failing(folder: str) -> tuple[list[str], Any]:
    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp
    from smddp_tensorflow.modelparallel import model as module

    model = model_of(smp, tf)
    x, found, ran = tf.ones((4, 3)), [], []

    @smp.register_post_partition_hook
    def hook() -> None:
        ran.append(len(model.trainable_variables))
        if smp.rank() == 1:
            raise KeyError("this rank only")

    step = smp.step(lambda rows: model(rows))
    since = time.monotonic()
    found.append(error_of(step, x))
    assert step(x).merge().shape == (4, 2)
    assert ran == [2]  # the model was divided before, and the hook does not run again
    if smp.rank() == 0:
        module.np = types.SimpleNamespace(asarray=np.asarray)  # type: ignore[attr-defined]
    found.append(error_of(model.save_model, "nowhere"))
    assert step(x).merge().shape == (4, 2)
    assert time.monotonic() - since < 40
    module.np = np  # type: ignore[attr-defined]
    model.save_model(folder)
    result = step(x).merge().numpy()
    smp.shutdown()
    return found, result


def loaded(folder: str) -> Any:
    """Returns what a saved model predicts, in a process without smp."""
    import tensorflow as tf

    model = tf.saved_model.load(folder)
    return model.serve(tf.ones((4, 3))).numpy()


@jobs.BOTH_KERAS
def test_hooks_and_save_model(env: Any, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    (first, result), (second, _) = jobs.run(failing, "2", folder, env=env, timeout=240)
    (found,) = jobs.run(loaded, "1", folder, env=env)
    np.testing.assert_allclose(found, result, rtol=1e-6, atol=1e-7)
    what = "a function of smp.register_post_partition_hook has failed on rank 1: KeyError"
    assert first[0].startswith(f"SMPPeerError: {what}"), first[0]
    assert second[0] == "KeyError: 'this rank only'"
    assert "has no attribute 'empty'" in first[1], first[1]
    assert "SMPPeerError: save_model has failed on rank 0: AttributeError" in second[1], second[1]


def half() -> None:
    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp
    from smddp_tensorflow.modelparallel import job
    from smddp_tensorflow.modelparallel.channel import Channel, Kind

    smp.init(TWO, timeout=60)
    group, values = job.group("channel"), tf.range(10000)
    channel = Channel(group, 60)
    send = group.send

    def late(array: Any, peer: int, tag: int, **how: Any) -> Any:
        if tag == 2:
            smp.barrier()  # the first part has been sent
            smp.barrier()  # rank 0 has stopped to wait for this one
        return send(array, peer, tag=tag, **how)

    if smp.rank() == 1:
        group.send = late
        channel.send(0, Kind.BEGIN, 1, None, [values])
        channel.flush()
    else:
        smp.barrier()
        channel.interrupt()
        assert channel.take(True) == []
        smp.barrier()
        (message,) = channel.take(True)
        assert (message.sender, message.step) == (1, 1)
        np.testing.assert_array_equal(message.tensors[0], values)
    smp.barrier()


def test_half_a_message_does_not_block() -> None:
    jobs.run(half, "2", timeout=120)


# --- arguments ------------------------------------------------------------------------------------


def signatures() -> None:
    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp

    model, x = begun(smp, tf)
    rank = smp.rank()
    rows_of = tf.TensorSpec([None, 3])
    expected = smp.step(lambda rows: model(rows))(x).merge()

    def scaled(rows: Any, pair: Any, times: float = 1.0) -> Any:
        return model(rows) * pair["one"] * tf.cast(pair["two"][0], tf.float32) * times

    factors = {"one": tf.TensorSpec([]), "two": [tf.TensorSpec([1], tf.int32)]}
    step = smp.step(scaled, input_signature=[rows_of, factors], non_split_inputs=["pair"])
    for rows in (x, x.numpy().tolist(), tf.cast(x, tf.float64)):
        for call in (step, tf.function(lambda *args, **kwargs: step(*args, **kwargs).merge())):
            pair = {"one": 2, "two": ([3.0],)}
            results = [call(rows, pair), call(pair=pair, rows=rows), call(rows, pair, times=2.0)]
            for result, times in zip(results, (6, 6, 12), strict=True):
                merged = result.merge() if call is step else result
                np.testing.assert_allclose(merged, expected * times, rtol=1e-5)

    pair = {"one": 1.0, "two": [[1]]}
    graph = tf.function(lambda rows: step(rows, pair).merge())
    since = time.monotonic()
    for call, good, bad, text in (
        (step, (x, pair), (x[:, :2], pair), "TensorSpec(shape=(None, 3)"),
        (step, (x, pair), (x, {"one": 1.0}), "argument 'pair' does not fit"),
        (step, (x, pair), (x, {"one": 1.0, "two": [[1, 2]]}), "TensorSpec(shape=(1,)"),
        (step, (x, pair), ("text", pair), "argument 'rows' does not fit its input_signature"),
        (step, (x, pair), (x,), "missing a required argument: 'pair'"),
        (graph, (x,), (x[:, :2],), "argument 'rows' does not fit its input_signature"),
    ):
        said = error_of(call, *(bad if rank else good))
        assert text in said, said
        np.testing.assert_allclose(step(x, pair).merge(), expected, rtol=1e-6)
    assert time.monotonic() - since < 50
    for specs in ([rows_of], [rows_of] * 4):
        assert "SMPUsageError: smp.step: scaled" in error_of(
            lambda specs=specs: smp.step(scaled, input_signature=specs)
        )
    several = smp.step(lambda *rows: model(tf.add_n(rows)), input_signature=[rows_of] * 2)
    np.testing.assert_allclose(several(x, 0.0 * x).merge(), expected, rtol=1e-6)
    assert "argument 'rows' does not fit" in error_of(several, x)

    across = smp.step(lambda columns: model(tf.transpose(columns)), input_split_axes={"columns": 1})
    np.testing.assert_allclose(across(tf.transpose(x)).merge(), expected, rtol=1e-6)
    smp.shutdown()


def test_an_input_signature() -> None:
    jobs.run(signatures, "2", timeout=200)


# --- results --------------------------------------------------------------------------------------


def returned() -> None:
    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp

    model, x = begun(smp, tf, optimize="speed", microbatches=4)
    state, kept = tf.Variable([1.0, 2.0]), tf.keras.Variable([3.0])

    @smp.step
    def step(rows: Any) -> Any:
        result = model(rows)
        ragged = tf.RaggedTensor.from_row_lengths(tf.reshape(result, [-1]), [1, 3])
        slices = tf.IndexedSlices(result[:1], [1], tf.constant([2, 2]))
        return {
            **{"result": result, "ragged": ragged, "sparse": tf.sparse.from_dense(result)},
            **{"state": state, "kept": kept, "slices": slices},
        }

    def merged(rows: Any) -> Any:
        made = step(rows)
        assert all(isinstance(one, smp.StepOutput) for one in made.values()), made
        return {name: one.merge() for name, one in made.items()}

    for call in (merged, tf.function(merged)):
        made = call(x)
        result = made["result"]
        assert made["ragged"].row_lengths().numpy().tolist() == [1, 3] * 4
        np.testing.assert_array_equal(made["ragged"].flat_values, tf.reshape(result, [-1]))
        np.testing.assert_array_equal(tf.sparse.to_dense(made["sparse"]), result)
        assert made["state"].numpy().tolist() == [1.0, 2.0] * 4
        assert made["kept"].numpy().tolist() == [3.0] * 4
        np.testing.assert_array_equal(made["slices"][1::2], result[::2])

    mean = tf.Variable(tf.zeros([2, 2]))
    made = step(x)["result"]
    np.testing.assert_array_equal(made.accumulate(var=mean), mean)
    np.testing.assert_allclose(mean, np.mean(made.outputs, 0), rtol=1e-6)
    smp.shutdown()


def test_results() -> None:
    jobs.run(returned, "2", timeout=200)
