"""`smdistributed.modelparallel.tensorflow`: arguments, results and failures of a step."""

from __future__ import annotations

import contextlib
import os
import time
import types
from pathlib import Path
from typing import Any

import jobs
import numpy as np
import pytest
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
    from smddp.modelparallel.tensorflow import model as module

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
    from smddp.modelparallel.tensorflow import job
    from smddp.modelparallel.tensorflow.channel import Channel, Kind

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


def composites() -> None:
    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp

    model, x = begun(smp, tf)
    ragged = tf.RaggedTensor.from_row_lengths(tf.range(10.0), [1, 2, 3, 0, 0, 1, 1, 2])
    dense = tf.reshape(tf.range(16.0), (8, 2)) * [[0.0, 1.0]]
    sparse = tf.sparse.from_dense(dense)

    def sums(rows: Any, words: Any, more: Any) -> Any:
        result = tf.reduce_sum(model(rows), 1) + tf.reduce_sum(words, 1)
        return result + tf.reduce_sum(tf.sparse.to_dense(more["sparse"]), 1), words, more["sparse"]

    expected = smp.step(lambda rows: tf.reduce_sum(model(rows), 1))(x).merge()
    expected = expected + tf.reduce_sum(ragged, 1) + tf.reduce_sum(dense, 1)
    step = smp.step(sums)

    def merged(*args: Any) -> Any:
        return [one.merge() for one in step(*args)]

    for call in (merged, tf.function(merged)):
        found, words, more = call(x, ragged, {"sparse": sparse})
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        assert words.to_list() == ragged.to_list()
        np.testing.assert_array_equal(tf.sparse.to_dense(more), dense)

    # Whole, and along another dimension.
    def of_whole(rows: Any, words: Any, columns: Any) -> Any:
        shapes = words.nrows(), columns.dense_shape
        return tf.reduce_sum(model(rows)), *shapes

    step = smp.step(of_whole, non_split_inputs=["words"], input_split_axes={"columns": 1})
    _, rows, shape = step(x, ragged, sparse)
    assert [int(one) for one in rows.outputs] == [8, 8]
    assert [one.numpy().tolist() for one in shape.outputs] == [[8, 1], [8, 1]]

    one = smp.step(lambda rows, words: model(rows), input_split_axes={"words": -1})
    other = smp.step(lambda rows, words: model(rows))
    slices = tf.IndexedSlices(x, tf.range(8), (8, 3))

    fields = {"__annotations__": {"first": tf.Tensor}}
    Pair = type("Pair", (tf.experimental.ExtensionType,), fields)  # noqa: N806
    for call, given, text in (
        (one, ragged, "argument 'words' has a tensor of shape (8, None): its dimension -1 is"),
        (other, ragged[:7], "argument 'words' has a tensor of shape (7, None): its dimension 0"),
        (other, tf.sparse.from_dense(dense[:7]), "shape (7, 2): its dimension 0 cannot be divided"),
        (other, slices, "argument 'words' has a IndexedSlices, which cannot be divided into"),
        (
            other,
            [Pair(x)],
            "argument 'words' has a Pair, which cannot be divided into microbatches",
        ),
    ):
        said = error_of(call, x, given)
        assert text in said, said
    whole = smp.step(lambda rows, pair: model(rows) * pair.first, non_split_inputs=["pair"])
    assert whole(x, Pair(tf.constant(2.0))).merge().shape == (8, 2)
    smp.shutdown()


def test_ragged_and_sparse_arguments() -> None:
    jobs.run(composites, "2", timeout=200)


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


def later_metrics() -> None:
    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp
    from smddp.modelparallel.tensorflow.trace import handle_of

    model, x = begun(smp, tf)
    # No ids of handles that the division has freed: a metric's handle may get one.
    divided = model._divided
    assert divided.handles == {handle_of(weight) for weight in divided.weights}
    metrics: list[Any] = []
    counted = tf.Variable(0.0)
    traces: list[int] = []

    @smp.step
    def step(rows: Any) -> Any:
        traces.append(not tf.executing_eagerly())
        result = model(rows)
        # tf.function would refuse to make variables.
        local = [tf.keras.metrics.Mean()] if len(metrics) < 2 else []
        for metric in (*metrics, *local):
            metric.update_state(tf.reduce_sum(result))
        if len(metrics) > 1:
            counted.assign_add(1.0)
        return tf.reduce_sum(result)

    sums: list[float] = []
    step(x)
    compiled = tf.function(lambda rows: step(rows).reduce_sum())
    calls = [lambda rows: step(rows).reduce_sum()] * 4 + [compiled] * 3
    for number, call in enumerate(calls):
        if number in (1, 3, 5):
            metrics.append(tf.keras.metrics.Mean())
        value = float(call(x + float(number)))
        sums.append(value / 2)
        for metric, since in zip(metrics, (1, 3, 5), strict=False):
            mean = np.mean(sums[since:])  # may be near 0
            np.testing.assert_allclose(float(metric.result()), mean, rtol=1e-6, atol=1e-6)
        assert float(counted) == 2 * max(0, number - 2)
    # Once for the first step, for each metric, and for the tf.function.
    assert sum(traces) == 5, traces

    # In turns; what comes later does not displace what came before.
    pair = [tf.keras.metrics.Sum(), tf.keras.metrics.Sum()]

    @smp.step
    def alternating(rows: Any, which: int) -> Any:
        pair[which].update_state(tf.ones([]))
        return model(rows)

    for number in range(6):
        alternating(x, number % 2)
        assert [float(one.result()) for one in pair] == [number // 2 * 2 + 2, (number + 1) // 2 * 2]
    smp.shutdown()


@jobs.BOTH_KERAS
def test_metrics_that_are_made_after_the_first_step(env: Any) -> None:
    jobs.run(later_metrics, "2", env=env, timeout=200)


def dropping(name: str, distributed: bool) -> Any:
    """Trains a model with a Dropout; returns losses, weights by number, and states of Dropout."""
    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp

    layer = tf.keras.layers
    base, partition = tf.keras.Model, contextlib.nullcontext
    if distributed:
        smp.init({**TWO, "auto_partition": name == "sequential", "default_partition": 0})
        base, partition = smp.DistributedModel, smp.partition

    class Block(layer.Layer):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.dense, self.drop = layer.Dense(16), layer.Dropout(0.5)

        def call(self, x: Any, training: Any = None) -> Any:
            return self.drop(self.dense(x), training=training)

    class Blocks(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.first = Block()
            with partition(1):
                self.second = Block()
            self.drops = [self.first.drop, self.second.drop]

        def call(self, x: Any, training: Any = None) -> Any:
            return self.second(self.first(x, training=training), training=training)

    class Sequential(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.drops = [layer.Dropout(0.5)]
            self.layer = tf.keras.Sequential([layer.Dense(16), *self.drops, layer.Dense(2)])

        def call(self, x: Any, training: Any = None) -> Any:
            return self.layer(x, training=training)

    tf.keras.utils.set_random_seed(3)
    model = {"blocks": Blocks, "sequential": Sequential}[name]()
    optimizer, losses = tf.keras.optimizers.SGD(0.01), []
    x = tf.reshape(tf.range(48.0), (8, 6)) / 48

    def step(rows: Any, training: bool) -> Any:
        loss = tf.reduce_mean(model(rows, training=training) ** 2)
        return loss, optimizer.get_gradients(loss, model.trainable_variables)

    def alone(rows: Any, training: bool) -> Any:
        found = []
        for part in tf.split(rows, 2):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(part, training=training) ** 2)
            found.append((loss, tape.gradient(loss, model.trainable_variables)))
        (one, first), (other, second) = found
        return [one, other], [(a + b) / 2 for a, b in zip(first, second, strict=True)]

    divided_step = smp.step(step)

    def divided(rows: Any, training: bool) -> Any:
        loss, gradients = divided_step(rows, training)
        return loss.outputs, [gradient.accumulate() for gradient in gradients]

    for training in (False, True, True, False, True):
        loss, gradients = (divided if distributed else alone)(x, training)
        losses += map(float, loss)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    weights = model._divided.weights if distributed else model.weights
    own = {id(weight) for weight in model.weights}
    values = {n: np.array(one) for n, one in enumerate(weights) if id(one) in own}
    states = [drop.seed_generator.state.numpy().tolist() for drop in model.drops]
    if distributed:
        smp.shutdown()
    return losses, values, states


@pytest.mark.parametrize("name", ["blocks", "sequential"])
def test_a_layer_with_state_and_without_weights(name: str) -> None:
    ((losses, weights, states),) = jobs.run(dropping, "1", name, False, timeout=120)
    ranks = jobs.run(dropping, "2", name, True, timeout=120)
    held: dict[int, Any] = {}
    for found, values, _ in ranks:
        np.testing.assert_allclose(found, losses, rtol=1e-5)
        held |= values
    assert held.keys() == weights.keys()
    for number, value in held.items():
        np.testing.assert_allclose(value, weights[number], rtol=1e-5, atol=1e-6)
    # All ranks have the state of what runs on the first one, and the owner that of its layer.
    assert ranks[0][2][0] == ranks[1][2][0] == states[0] != [3, 0]
    assert ranks[1][2] == states


def own_state() -> None:
    """Lets the function's own state, which only rank 0 has, decide which variables it changes."""
    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp

    model, x = begun(smp, tf)
    counted, kept = tf.Variable(0.0), tf.Variable(0.0)
    values, calls = [5.0], []

    @smp.step
    def taking(rows: Any, on: bool) -> Any:
        kept.assign_add(1.0)
        if on and values:
            counted.assign(values.pop())
        return model(rows)

    @smp.step
    def counting(rows: Any) -> Any:
        calls.append(1)
        kept.assign_add(1.0)
        if len(calls) > 4:  # rank 0: in the second step; others: later
            counted.assign_add(1.0)
        return model(rows)

    text = "whether it changes a variable may depend on its arguments only"
    taking(x, False)
    assert text in error_of(taking, x, True)
    taking(x, True)
    counting(x)
    assert text in error_of(counting, x)
    for _ in range(2):
        assert text in error_of(counting, x)
    assert float(kept) == 2 * 7
    smp.shutdown()


def test_changes_that_other_ranks_cannot_find() -> None:
    jobs.run(own_state, "2", timeout=200)


def unused() -> None:
    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp

    model, x = begun(smp, tf)
    optimizer = tf.keras.optimizers.SGD(0.1)

    def gradients(rows: Any, uses: str, wanted: str) -> Any:
        result = model(rows)
        if uses == "first":  # not what follows
            result = model.one(rows) + 0.0 * tf.stop_gradient(result[:, :1])
        variables = list(model.trainable_variables)
        if wanted == "reversed":
            variables = variables[::-1]
        elif wanted == "last":
            variables = variables[1:3]
        return optimizer.get_gradients(tf.reduce_sum(result**2), variables)

    step = smp.step(gradients)

    def accumulated(*args: Any) -> Any:
        return [one.accumulate() for one in step(*args)]

    for uses in ("both", "first"):
        for wanted in ("all", "reversed", "last"):
            eager = accumulated(x, uses, wanted)
            graph = tf.function(accumulated)(x, uses, wanted)
            assert len(eager) == len(graph) == (1 if wanted == "last" else 2)
            for one, other in zip(eager, graph, strict=True):
                assert (one is None) == (other is None) == (uses == "first" and smp.rank() == 1)
                if one is not None:
                    np.testing.assert_allclose(one, other, rtol=1e-6)

    uses = {"second": False}

    @smp.step
    def changing(rows: Any) -> Any:
        result = model(rows) if uses["second"] else model.one(rows)
        loss = tf.reduce_sum(result)
        return optimizer.get_gradients(loss, model.trainable_variables)

    compiled = tf.function(lambda rows: [one.accumulate() for one in changing(rows)])
    compiled(x)
    uses["second"] = True
    said = error_of(compiled, x)
    assert "has a gradient, and had none when tf.function traced the step" in said, said

    smp.shutdown()
    model = model_of(smp, tf)
    model.two.trainable = False
    smp.step(lambda rows: model(rows))(x)
    model.two.trainable = True
    step = smp.step(
        lambda rows: optimizer.get_gradients(tf.reduce_sum(model(rows)), model.trainable_variables)
    )
    stranger = tf.Variable(1.0, name="stranger")
    other = smp.step(lambda rows: optimizer.get_gradients(tf.reduce_sum(model(rows)), [stranger]))
    for call in (step, tf.function(lambda rows: step(rows)[0].accumulate())):
        said = error_of(call, x)
        assert "variable 'kernel" in said or "kernel:0': it was not" in said, said
        assert "was not trainable when the model was divided. Make layers trainable" in said, said
    said = error_of(other, x)
    assert "'stranger" in said, said
    assert "it is no trainable variable of the smp.DistributedModel" in said, said
    smp.shutdown()


@jobs.BOTH_KERAS
def test_gradients_that_are_missing(env: Any) -> None:
    jobs.run(unused, "2", env=env, timeout=200)


def trained_alone(optimizer: Any, frozen: str, apply: Any) -> list[Any]:
    """Returns the weights of the model of `trained`, in one process."""
    import tensorflow as tf

    tf.keras.utils.set_random_seed(1)
    layers = {name: tf.keras.layers.Dense(size) for name, size in (("one", 3), ("two", 2))}
    model = tf.keras.Sequential(list(layers.values()))
    model.build((8, 3))
    if frozen:
        layers[frozen].trainable = False
    for _ in range(3):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(batch(tf)) ** 2)
        variables = model.trainable_variables
        apply(optimizer, tape.gradient(loss, variables), variables)
    return [np.array(one) for layer in layers.values() for one in layer.weights]


def batch(tf: Any) -> Any:
    return tf.reshape(tf.range(24.0), (8, 3)) / 8


def trained(make: Any, frozen: str, apply: Any, graph: bool) -> tuple[Any, list[Any]]:
    """Returns the optimizer, and the weights of all ranks."""
    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp

    tf.keras.utils.set_random_seed(1)
    model, optimizer = model_of(smp, tf), make()
    model.build((8, 3))
    if frozen:
        getattr(model, frozen).trainable = False

    @smp.step
    def step(rows: Any) -> Any:
        loss = tf.reduce_mean(model(rows) ** 2)
        return optimizer.get_gradients(loss, model.trainable_variables)

    def train(rows: Any) -> None:
        gradients = [one.accumulate() for one in step(rows)]
        apply(optimizer, gradients, model.trainable_variables)

    train = tf.function(train) if graph else train
    for _ in range(3):
        train(batch(tf))
    parts = smp.allgather([np.array(one) for one in model.variables], smp.PP_GROUP)
    smp.shutdown()
    return optimizer, [one for part in parts for one in part]


def applied(optimizer: Any, gradients: Any, variables: Any) -> None:
    optimizer.apply_gradients(zip(gradients, variables, strict=True))


def frozen_rank() -> None:
    import tensorflow as tf

    kinds = [tf.keras.optimizers.Adam]
    if os.environ.get("TF_USE_LEGACY_KERAS"):
        kinds.append(tf.keras.optimizers.legacy.Adam)
    for kind in kinds:
        for frozen in ("one", "two"):
            expected = trained_alone(kind(0.1), frozen, applied)
            for graph in (False, True):
                optimizer, found = trained(lambda kind=kind: kind(0.1), frozen, applied, graph)
                assert int(optimizer.iterations) == 3
                for one, other in zip(found, expected, strict=True):
                    np.testing.assert_allclose(one, other, rtol=1e-5)


@jobs.BOTH_KERAS
def test_a_rank_whose_layers_are_frozen(env: Any) -> None:
    jobs.run(frozen_rank, "2", env=env, timeout=200)


def clipped() -> None:
    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp

    kind = tf.keras.optimizers.SGD

    def norm_of_all(own: Any) -> Any:
        return np.linalg.norm(smp.allgather(own.numpy(), smp.PP_GROUP))

    def clip(optimizer: Any, gradients: Any, variables: Any) -> None:
        norm = tf.py_function(norm_of_all, [tf.linalg.global_norm(gradients)], tf.float32)
        gradients, _ = tf.clip_by_global_norm(gradients, 0.5, use_norm=norm)
        applied(optimizer, gradients, variables)

    expected = trained_alone(kind(0.1, global_clipnorm=0.5), "", applied)
    for graph in (False, True):
        _, found = trained(lambda: kind(0.1), "", clip, graph)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5)
        said = error_of(trained, lambda: kind(0.1, global_clipnorm=0.5), "", applied, graph)
        assert "with global_clipnorm each rank would clip by the norm of its own" in said, said
        smp.shutdown()


@jobs.BOTH_KERAS
def test_clipping_by_the_norm_over_all_ranks(env: Any) -> None:
    jobs.run(clipped, "2", env=env, timeout=200)
