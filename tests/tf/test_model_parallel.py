"""`smdistributed.modelparallel.tensorflow`: ranks train what one process trains."""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import time
from pathlib import Path
from typing import Any

import jobs
import numpy as np
import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "smp_digits_tensorflow.py"
TWO = {"partitions": 2, "microbatches": 2, "optimize": "memory", "horovod": True}
BATCH, STEPS, RATE = 8, 3, 0.1


def by_name(variables: Any) -> dict[str, np.ndarray]:
    """Returns values by their shapes: no model here has two variables of one shape."""
    return {str(tuple(variable.shape)): np.array(variable) for variable in variables}


def compare(found: list[Any], losses: Any, values: dict[str, np.ndarray]) -> None:
    """Compares what ranks of one pipeline hold and have computed with one process."""
    held: dict[str, np.ndarray] = {}
    for rank_losses, rank_values in found:
        np.testing.assert_allclose(rank_losses, losses, rtol=1e-5)
        assert rank_values, "a rank holds nothing"
        assert not held.keys() & rank_values.keys()
        held |= rank_values
    assert held.keys() == values.keys()
    for name, value in held.items():
        np.testing.assert_allclose(value, values[name], rtol=1e-5, atol=1e-5)


# --- the MNIST script -----------------------------------------------------------------------------

# What AWS's announcement of the original library shows, where dots stand for what it leaves out.
SHOWN = """
import smdistributed.modelparallel.tensorflow as smp
smp.init()
...
class MyModel(smp.DistributedModel):
def __init__(self):
super(MyModel, self).__init__()
self.conv = Conv2D(32, 3, activation="relu")
self.flatten = Flatten()
self.dense1 = Dense(128)
self.dense2 = Dense(10)
...
@smp.step
def forward_backward(images, labels):
predictions = model(images, training=True)
loss = loss_obj(labels, predictions)
grads = optimizer.get_gradients(loss, model.trainable_variables)
return grads, loss
"""


def test_the_script_has_the_lines_that_were_published() -> None:
    lines = [line.strip() for line in SCRIPT.read_text().splitlines()]
    text = "\n".join(line for line in lines if line)
    for part in SHOWN.split("..."):
        assert f"\n{part.strip()}\n" in text, part


def script(pipelines: list[str]) -> Any:
    import smdistributed.modelparallel.tensorflow as smp

    found = []
    for pipeline in pipelines:
        os.environ["SM_HP_MP_PARAMETERS"] = json.dumps({**TWO, "pipeline": pipeline})
        names = runpy.run_path(str(SCRIPT))
        assert names["model"].conv.built
        found.append((names["losses"], by_name(names["model"].trainable_variables)))
        smp.shutdown()
    return found


def script_alone() -> Any:
    import tensorflow as tf
    from sklearn.datasets import load_digits

    keras = tf.keras
    keras.utils.set_random_seed(1)
    digits = load_digits()
    images = (digits.images[..., np.newaxis] / 16).astype(np.float32)
    layer = keras.layers
    model = keras.Sequential(
        [
            layer.Conv2D(32, 3, activation="relu"),
            layer.Flatten(),
            layer.Dense(128),
            layer.Dense(10),
        ]
    )
    loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer, losses = keras.optimizers.Adam(), []
    for step in range(20):
        rows = slice(64 * step, 64 * (step + 1))
        with tf.GradientTape() as tape:
            loss = loss_object(digits.target[rows], model(images[rows], training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        losses.append(float(loss))
    return losses, by_name(model.trainable_variables)


@jobs.BOTH_KERAS
def test_the_mnist_script(env: Any) -> None:
    pipelines = ["interleaved", "simple"]
    ((losses, values),) = jobs.run(script_alone, "1", env=env)
    assert losses[-1] < losses[0] / 2
    first, second = jobs.run(script, "2", pipelines, env=env)
    for one, other in zip(first, second, strict=True):
        compare([one, other], losses, values)


# --- models ---------------------------------------------------------------------------------------


def models(tf: Any, base: Any, partition: Any = contextlib.nullcontext) -> dict[str, Any]:
    """Returns makers of models, with `base` as the class."""
    keras = tf.keras
    layer = keras.layers

    class UNet(base):  # type: ignore[misc]
        """Skips over the border between partitions; normalisation keeps statistics."""

        def __init__(self) -> None:
            super().__init__()
            self.down = [layer.Conv2D(4, 3, padding="same"), layer.Conv2D(6, 3, padding="same")]
            self.norm = layer.BatchNormalization()
            self.middle = layer.Conv2D(8, 3, padding="same")
            self.up = [layer.Conv2D(7, 3, padding="same"), layer.Conv2D(5, 3, padding="same")]
            self.last = layer.Dense(1)
            self.pool, self.grow = layer.MaxPooling2D(), layer.UpSampling2D()

        def call(self, x: Any) -> Any:
            one = self.down[0](x)
            two = self.norm(self.down[1](self.pool(one)))
            x = self.up[0](tf.concat([self.grow(self.middle(self.pool(two))), two], -1))
            return self.last(self.up[1](tf.concat([self.grow(x), one], -1)))

    class Shared(base):  # type: ignore[misc]
        """One layer is called three times, and another one uses its kernel."""

        def __init__(self) -> None:
            super().__init__()
            self.first = layer.Dense(9)
            self.shared = layer.Dense(9, activation="tanh", use_bias=False)
            self.inner = keras.Sequential([layer.Dense(11), layer.Dropout(0.0), layer.Dense(12)])
            self.last = layer.Dense(1)

        def call(self, x: Any, training: Any = None) -> Any:
            x = self.first(tf.reshape(x, [-1, 64]))
            for _ in range(3):
                x = self.shared(x)
            return self.last(self.inner(x, training=training))

    class Masked(base):  # type: ignore[misc]
        """Words of different lengths: the mask of the embedding goes with the values."""

        def __init__(self) -> None:
            super().__init__()
            self.embed = layer.Embedding(20, 6, mask_zero=True)
            self.dense = layer.Dense(5)
            self.lstm = layer.LSTM(7)
            self.last = layer.Dense(1)

        def call(self, x: Any) -> Any:
            words = tf.cast(tf.abs(tf.reshape(x, [-1, 64])[:, :10]) * 4, tf.int32)
            return self.last(self.lstm(self.dense(self.embed(words))))

    class Block(layer.Layer):  # type: ignore[misc]
        """Lives on one rank, and calls a layer of another one twice."""

        def __init__(self) -> None:
            super().__init__()
            self.mine = layer.Dense(6)
            with partition(0):
                self.other = layer.Dense(6, activation="tanh")

        def call(self, x: Any) -> Any:
            return self.other(self.mine(self.other(x))), tf.shape(x)[0]

    class Nested(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.first = layer.Dense(6)
            with partition(1):
                self.block = Block()
            self.last = layer.Dense(1)

        def call(self, x: Any) -> Any:
            x, rows = self.block(x=self.first(tf.reshape(x, [-1, 64])))
            return self.last(x) * tf.cast(rows // rows, tf.float32)

    return {"unet": UNet, "shared": Shared, "masked": Masked, "nested": Nested}


def data(tf: Any, size: int = BATCH * STEPS) -> Any:
    source = np.random.default_rng(0)
    return tf.constant(source.normal(size=(size, 8, 8, 1)).astype(np.float32))


def loss_of(tf: Any, result: Any) -> Any:
    return tf.reduce_mean(
        tf.square(tf.reduce_mean(tf.reshape(result, [result.shape[0], -1]), 1) - 0.5)
    )


def train_alone() -> Any:
    """Trains every model on microbatches, whose gradients are averaged, in one process."""
    import tensorflow as tf

    found = {}
    for name, make in models(tf, tf.keras.Model).items():
        tf.keras.utils.set_random_seed(3)
        model, optimizer, losses = make(), tf.keras.optimizers.Adam(RATE), []
        for step in range(STEPS):
            rows = data(tf)[BATCH * step : BATCH * (step + 1)]
            sums: Any = None
            for part in tf.split(rows, 4):
                with tf.GradientTape() as tape:
                    loss = loss_of(tf, model(part, training=True))
                losses.append(float(loss))
                made = tape.gradient(loss, model.trainable_variables)
                made = [tf.convert_to_tensor(one) / 4 for one in made]
                sums = made if sums is None else [a + b for a, b in zip(sums, made, strict=True)]
            optimizer.apply_gradients(zip(sums, model.trainable_variables, strict=True))
        losses.append(float(loss_of(tf, model(data(tf), training=False))))
        found[name] = losses, [np.array(weight) for weight in model.weights]
    return found


def train(folder: str, microbatches: int, names: list[str], pipelines: list[str]) -> Any:
    """The same on ranks; returns losses, and values with their numbers in the whole model."""
    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp

    found = {}
    for name, pipeline in zip(names, pipelines, strict=True):
        config = {**TWO, "microbatches": microbatches, "pipeline": pipeline}
        if name == "nested":
            config |= {"auto_partition": False, "default_partition": 0}
        smp.init(config, timeout=60)
        tf.keras.utils.set_random_seed(3)
        model, optimizer, losses = (
            models(tf, smp.DistributedModel, smp.partition)[name](),
            tf.keras.optimizers.Adam(RATE),
            [],
        )
        hooked = []
        smp.register_post_partition_hook(lambda hooked=hooked: hooked.append(1))

        @smp.step
        def forward_backward(rows: Any, model: Any = model, optimizer: Any = optimizer) -> Any:
            loss = loss_of(tf, model(rows, training=True))
            return {"g": optimizer.get_gradients(loss, model.trainable_variables), "l": loss}

        metric = tf.keras.metrics.Mean()

        @smp.step(non_split_inputs=["whole"])
        def evaluate(rows: Any, whole: Any, model: Any = model, metric: Any = metric) -> Any:
            result = model(rows, training=False)
            metric.update_state(tf.reduce_sum(result))
            return result, whole.shape[0], [tf.reduce_sum(tf.square(rows))]

        def step(
            rows: Any, run: Any = forward_backward, model: Any = model, optimizer: Any = optimizer
        ) -> Any:
            made = run(rows)
            gradients = [gradient.accumulate() for gradient in made["g"]]
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return tf.stack(made["l"].outputs)

        # One of them as scripts for the original library do it.
        call = tf.function(step) if name == "unet" else step
        manager = smp.CheckpointManager(
            smp.Checkpoint(model=model, optimizer=optimizer), f"{folder}/{name}", max_to_keep=2
        )
        for number in range(STEPS):
            start = BATCH * number + smp.dp_rank()
            rows = data(tf)[start : BATCH * (number + 1) : smp.dp_size()]
            losses += list(map(float, call(rows)))
            if number == 1:
                assert manager.save() == "ckpt-1"
                trained = [np.array(variable) for variable in model.variables]
            if number == 2:  # back to the second step, and once more
                ended = [np.array(variable) for variable in model.variables]
                assert manager.restore() == "ckpt-1"
                for variable, value in zip(model.variables, trained, strict=True):
                    np.testing.assert_array_equal(np.array(variable), value)
                call(rows)
                for variable, value in zip(model.variables, ended, strict=True):
                    np.testing.assert_array_equal(np.array(variable), value)
        assert hooked == [1]
        result, count, sums = evaluate(data(tf), data(tf))
        if smp.pp_size() > 1:
            with pytest.raises(smp.SMPUsageError, match="call it inside a function"):
                model(data(tf))
        assert count == [BATCH * STEPS] * microbatches
        whole = tf.reduce_sum(tf.square(data(tf)))
        np.testing.assert_allclose(sums[0].reduce_sum(), whole, rtol=1e-5)
        sums = [float(tf.reduce_sum(one)) for one in result.outputs]
        np.testing.assert_allclose(float(metric.result()), np.mean(sums), rtol=1e-5)
        losses.append(float(loss_of(tf, result.merge())))
        divided = model._divided
        numbers = {id(weight): number for number, weight in enumerate(divided.weights)}
        mine = {
            numbers[id(variable)]: np.array(variable)
            for variable in model.variables
            if id(variable) in numbers
        }
        assert 0 < len(mine) < len(numbers)
        found[name] = losses, mine
        if name == "shared" and smp.dp_size() == 1:
            model.save_model(f"{folder}/saved")
        smp.shutdown()
    return found


def compare_models(alone: Any, ranks: Any, names: list[str]) -> None:
    for name in names:
        losses, values = alone[name]
        held: dict[int, np.ndarray] = {}
        for found in ranks:
            np.testing.assert_allclose(found[name][0], losses, rtol=1e-5)
            held |= found[name][1]
        assert len(held) == len(values)
        for number, value in held.items():
            np.testing.assert_allclose(value, values[number], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@jobs.BOTH_KERAS
def test_models(env: Any, tmp_path: Path) -> None:
    names, pipelines = ["unet", "shared", "masked", "nested"], ["interleaved", "simple"]
    (alone,) = jobs.run(train_alone, "1", env=env)
    for used, order in ((names, pipelines * 2), (names[:2], pipelines[::-1])):
        folder = str(tmp_path / order[0])
        compare_models(alone, jobs.run(train, "2", folder, 4, used, order, env=env), used)
        assert Path(folder, "saved", "saved_model.pb").exists()


@pytest.mark.slow
def test_replicas(tmp_path: Path) -> None:
    """Two pipelines of two ranks; each has every second row of each batch."""
    names = ["masked", "shared"]
    (alone,) = jobs.run(train_alone, "1")
    ranks = jobs.run(train, "2x2", str(tmp_path), 2, names, ["interleaved", "simple"])
    for name in names:
        # The ranks of a replica have the losses of its rows, those of the whole batch are the same
        # rows in another order.
        total = np.array([found[name][0] for found in ranks])
        np.testing.assert_array_equal(total[0], total[1])
        np.testing.assert_array_equal(total[2], total[3])
        for step in range(STEPS):
            whole = np.mean(alone[name][0][4 * step : 4 * step + 4])
            np.testing.assert_allclose(total[::2, 2 * step : 2 * step + 2].mean(), whole, rtol=1e-5)
        for found in ranks:
            for number, value in found[name][1].items():
                np.testing.assert_allclose(value, alone[name][1][number], rtol=1e-5, atol=1e-5)


def order() -> dict[str, str]:
    """Returns for each pipeline the order of forward (F) and backward (B) passes on this rank."""
    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp

    class Noted(tf.keras.layers.Dense):  # type: ignore[misc]
        def call(self, x: Any) -> Any:
            @tf.custom_gradient  # type: ignore[untyped-decorator]
            def note(y: Any) -> Any:
                log.append("F")
                return tf.identity(y), lambda dy: log.append("B") or dy

            time.sleep(0.05)
            return note(super().call(x))

    class Model(smp.DistributedModel):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = Noted(3), Noted(3)

        def call(self, x: Any) -> Any:
            return self.two(self.one(x))

    found = {}
    for pipeline, active in (("simple", 4), ("interleaved", 2)):
        log: list[str] = []
        config = {"pipeline": pipeline, "microbatches": 4, "active_microbatches": active}
        smp.init({"partitions": 2, **config}, timeout=60)
        model, optimizer = Model(), tf.keras.optimizers.SGD(RATE)
        x = tf.ones((4, 3))

        @smp.step
        def step(rows: Any, model: Any = model, optimizer: Any = optimizer) -> Any:
            loss = tf.reduce_sum(model(rows))
            return optimizer.get_gradients(loss, model.trainable_variables)

        @tf.function
        def twice(x: Any, step: Any = step, model: Any = model, optimizer: Any = optimizer) -> Any:
            for _ in range(2):
                gradients = [gradient.accumulate() for gradient in step(x)]
                for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
                    variable.assign(variable - RATE * gradient)
            return gradients[0]

        step(x)
        log.clear()
        step(x)
        found[pipeline] = "".join(log)
        # The second step sees what the first one of a graph has changed.
        eager = [np.array(variable) for variable in model.trainable_variables]
        graph = np.array(twice(x))
        for variable, value in zip(model.trainable_variables, eager, strict=True):
            variable.assign(value)
        for _ in range(2):
            gradients = [gradient.accumulate() for gradient in step(x)]
            for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
                variable.assign(variable - RATE * gradient)
        np.testing.assert_array_equal(np.array(gradients[0]), graph)
        smp.shutdown()
    return found


@pytest.mark.slow
def test_the_order_of_work() -> None:
    for found in jobs.run(order, "2"):
        assert found["simple"] == "FFFFBBBB"
        assert sorted(found["interleaved"]) == sorted("FFFFBBBB")
        assert found["interleaved"].index("B") <= 2


# --- errors ---------------------------------------------------------------------------------------


def said(smp: Any, function: Any, *args: Any) -> str:
    """Returns class and text of the error that a call raises."""
    try:
        function(*args)
    except smp.SMPError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def misuse() -> dict[str, str]:
    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp

    layer, found = tf.keras.layers, {}
    rank = int(os.environ["RANK"])
    found["before"] = said(smp, smp.rank)
    for name, config in (
        ("value", {"partitions": 2, "pipeline": "fast"}),
        ("torch", {"partitions": 2, "tensor_parallel_degree": 2}),
        ("one rank", {"partitions": 2, "microbatches": -1} if rank else {"partitions": 2}),
        ("differs", {"partitions": 2, "microbatches": 2 + rank}),
        ("ranks", {"partitions": 3}),
        ("replicas", {"partitions": 1}),
    ):
        found[name] = said(smp, lambda config=config: smp.init(config, timeout=60))

    class Boom(layer.Layer):  # type: ignore[misc]
        armed = False

        def build(self, shape: Any) -> None:
            self.scale = self.add_weight(name="scale", shape=(1,), initializer="ones")

        def call(self, x: Any) -> Any:
            if self.armed and float(x[0, 0]) > 30:
                raise KeyError("no such thing")
            return x * self.scale

    class Model(smp.DistributedModel):  # type: ignore[misc]
        def __init__(self, *layers: Any) -> None:
            super().__init__()
            self.list = list(layers)

        def call(self, x: Any) -> Any:
            for one in self.list:
                x = one(x)
            return x

    def begin(*layers: Any, **config: Any) -> Any:
        smp.shutdown()
        smp.init({**TWO, **config})
        return Model(*layers)

    x = tf.constant(np.arange(32).reshape(8, 4).astype(np.float32))
    optimizer = tf.keras.optimizers.SGD(RATE)

    def mean(y: Any) -> Any:
        return tf.reduce_mean(y)

    smp.init(TWO, timeout=60)
    found["index"] = said(smp, lambda: smp.partition(2).__enter__())
    found["no model"] = said(smp, smp.step(lambda rows: rows), x)
    two = layer.Dense(3), layer.Dense(2)
    model, stranger = begin(*two), layer.Dense(2)
    found["stranger"] = said(smp, smp.step(lambda rows: mean(stranger(model(rows)))), x)
    found["tape"] = said(smp, smp.step(lambda rows: tf.GradientTape().gradient(model(rows), [])), x)

    def clip(rows: Any) -> Any:
        gradients = optimizer.get_gradients(mean(model(rows)), model.trainable_variables)
        return [tf.clip_by_norm(gradient, 1.0) for gradient in gradients]

    found["clip"] = said(smp, smp.step(clip), x)
    evaluate = smp.step(lambda rows: mean(model(rows)))
    assert said(smp, evaluate, x) == "nothing"
    found["odd"] = said(smp, evaluate, x[:7])
    one, other = smp.step(lambda rows: model(rows)), smp.step(lambda rows: model(rows))
    one.__name__ = "one"
    assert (said(smp, one, x), said(smp, other, x)) == ("nothing", "nothing")

    @smp.step
    def named_one(rows: Any) -> Any:
        return model(rows)

    @smp.step
    def named_other(rows: Any) -> Any:
        return model(rows)

    named_one(x), named_other(x)
    found["order"] = said(smp, named_other if rank else named_one, x)
    late = layer.Dense(2)
    late.build((None, 2))

    @smp.step
    def changing(rows: Any) -> Any:
        return late(model(rows)) if changing_now else model(rows)

    changing_now = False
    changing(x)
    changing_now = True
    found["late"] = said(smp, changing, x)

    begin(layer.Dense(3))
    found["too few"] = said(smp, smp.step(lambda rows: smp_model()(rows)), x)
    manual = {"auto_partition": False, "default_partition": 0}
    begin(layer.Dense(3), layer.Dense(2), **manual)
    found["empty"] = said(smp, smp.step(lambda rows: smp_model()(rows)), x)
    first = layer.Dense(4)
    model = begin(first, **manual)
    with smp.partition(1):
        model.list.append(layer.Dense(4))
    crossing = smp.step(lambda rows: model(rows) @ model.list[1].kernel)
    found["crossing"] = said(smp, crossing, x)

    two_replicas = {"partitions": 1, "horovod": True}
    model = begin(layer.BatchNormalization(synchronized=True), layer.Dense(2), **two_replicas)
    found["synchronized"] = said(smp, smp.step(lambda rows: mean(model(rows))), x)

    boom = Boom()
    model = begin(layer.Dense(4, kernel_initializer="ones"), boom, microbatches=4)
    step = smp.step(
        lambda rows: optimizer.get_gradients(mean(model(rows)), model.trainable_variables)
    )
    before = [float(tf.reduce_sum(gradient.accumulate())) for gradient in step(x)]
    boom.armed = rank == 1
    found["boom"] = said(smp, step, x)
    boom.armed = False
    model.compile("sgd", "mse")
    found["fit"] = said(smp, lambda: model.fit(x, x, verbose=0))
    assert [float(tf.reduce_sum(gradient.accumulate())) for gradient in step(x)] == before
    model = begin(*two)
    model.compile("sgd", "mse")
    found["fit before a step"] = said(smp, lambda: model.fit(x, x[:, :2], verbose=0))
    smp.shutdown()
    return found


def smp_model() -> Any:
    from smddp.modelparallel.tensorflow.model import current

    return current()


@pytest.mark.slow
def test_errors_are_named_on_all_ranks() -> None:
    texts = {
        "before": "SMPInitializationError: call smp.init() first",
        "value": "SMPConfigurationError: pipeline must be a value in",
        "torch": "SMPConfigurationError: tensor_parallel_degree is for PyTorch",
        "differs": "microbatches is 2 on rank 0, 3 on rank 1",
        "ranks": "SMPInitializationError: 2 ranks cannot be divided into pipelines of 3",
        "replicas": "needs horovod: True",
        "index": "SMPUsageError: smp.partition(2): the configuration has 2 partitions",
        "no model": "SMPUsageError: smp.step needs an smp.DistributedModel",
        "stranger": "which belongs to no partition",
        "tape": "SMPUsageError: tf.GradientTape does not see layers of other ranks",
        "clip": "gradients cannot be changed inside smp.step",
        "odd": "its dimension 0 cannot be divided into 2 microbatches",
        "order": "rank 0 of the pipeline runs step 'named_one', and rank 1 runs 'named_other'",
        "late": "belongs to no partition: it was made after the first step",
        "too few": "SMPPartitionError: the model cannot be divided into 2 partitions: it has 1",
        "empty": "SMPPartitionError: partition 1 gets no layer with weights",
        "crossing": "on partition 0 uses a weight of layer",
        "synchronized": "is synchronized, but smp normalizes each microbatch of a replica by",
        "boom": "SMPMicrobatchError: rank 1 of the pipeline, microbatch 1: KeyError",
        "fit": "SMPUsageError: model.fit and model.train_on_batch cannot train",
        "fit before a step": "SMPUsageError: model.fit and model.train_on_batch cannot train",
    }
    first, second = jobs.run(misuse, "2")
    assert first.pop("one rank").startswith("SMPConfigurationError: rank 1: ")
    assert second.pop("one rank").startswith("SMPConfigurationError: The number of microbatches")
    for found in (first, second):
        assert found.keys() == texts.keys()
        for name, text in texts.items():
            assert text in found[name], f"{name}: {found[name]}"


def lost(how: str) -> str:
    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp

    smp.init({**TWO, "microbatches": 1}, timeout=10 if how == "absent" else 60)

    class Model(smp.DistributedModel):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = tf.keras.layers.Dense(3), tf.keras.layers.Dense(3)
            self.fails = False

        def call(self, x: Any) -> Any:
            if self.fails:
                raise ValueError("this rank only")
            return self.two(self.one(x))

    model = Model()
    x = tf.ones((4, 3))
    step = smp.step(lambda rows: model(rows))
    step(x)
    smp.barrier()
    if smp.rank() == 1 and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if smp.rank() == 1 and how == "absent":
        time.sleep(14)
        return "absent"
    model.fails = how == "replica" and smp.rank() == 2
    return said(smp, step, x)


@pytest.mark.slow
def test_a_rank_that_is_gone() -> None:
    survivor, none = jobs.run(lost, "2", "killed")
    assert none is None
    assert survivor.startswith("SMPPeerError: "), survivor
    assert "rank 1" in survivor
    waiting, _ = jobs.run(lost, "2", "absent")
    assert waiting.startswith("SMPPeerError: "), waiting
    assert "no message has come for 10 s" in waiting
    assert "on rank 1 of the pipeline" in waiting


@pytest.mark.slow
def test_another_replica_fails() -> None:
    found = jobs.run(lost, "4", "replica")
    for text in found[:2]:
        assert "SMPPeerError: the step has failed on rank 2: SMPMicrobatchError" in text, text
    for text in found[2:]:
        assert "SMPMicrobatchError: rank 0 of the pipeline, microbatch 0: ValueError" in text, text
