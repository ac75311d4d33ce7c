"""`smdistributed.modelparallel.tensorflow`: what one rank cannot do ends on all of them."""

from __future__ import annotations

import collections
import contextlib
import json
import logging
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import jobs
import numpy as np
import pytest
from jobs import error_of

TWO = {"partitions": 2, "microbatches": 2}
Named = collections.namedtuple("Named", ["gradients", "first", "second", "loss"])


def model_of(smp: Any, tf: Any, **config: Any) -> Any:
    """Begins a job, and returns a model of two layers."""
    smp.init({**TWO, **config}, timeout=60)

    class Model(smp.DistributedModel):  # type: ignore[misc]
        seconds = 0

        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = tf.keras.layers.Dense(3), tf.keras.layers.Dense(2)

        def call(self, x: Any) -> Any:
            time.sleep(self.seconds if tf.executing_eagerly() else 0)
            return self.two(self.one(x))

        def train_step(self, data: Any) -> Any:
            raise AssertionError("each rank would train a model of its own")

    return Model()


# --- steps ----------------------------------------------------------------------------------------


def steps() -> None:
    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp

    model = model_of(smp, tf)
    rank = smp.rank()
    optimizer = tf.keras.optimizers.SGD(0.1)
    x = tf.reshape(tf.range(24.0), (8, 3))

    def returned(rows: Any, pair: bool) -> Any:
        result = model(rows)
        return (result, rows) if pair else tf.reduce_sum(result, 1)

    step = smp.step(returned)
    expected = {(size, pair): step(x[:size], pair) for size in (8, 4) for pair in (True, False)}
    # A tf.function gets what eager code gets, whatever it was traced for first.
    compiled = tf.function(
        lambda rows, pair: (
            tf.nest.map_structure(
                lambda one: one.merge(), step(rows, pair), expand_composites=False
            )
            if not pair
            else [one.merge() for one in step(rows, pair)]
        )
    )
    for (size, pair), found in expected.items():
        made = compiled(x[:size], pair)
        for one, other in zip(made if pair else [made], found if pair else [found], strict=True):
            assert one.shape == other.merge().shape
            np.testing.assert_allclose(one, other.merge(), rtol=1e-6)

    # One rank cannot begin; the next step works.
    odd = error_of(step, x[: 7 if rank else 8], False)
    assert "cannot be divided into 2 microbatches" in odd, odd
    np.testing.assert_allclose(step(x, False).merge(), expected[8, False].merge(), rtol=1e-6)

    def failing(rows: Any, bad: bool) -> Any:
        if bad:
            raise ValueError("this rank only")
        return model(rows)

    fails = smp.step(failing)
    graph = tf.function(lambda rows, bad: fails(rows, bad).merge())
    graph(x, False)
    text = error_of(graph, x[:4], rank == 1)
    assert "this rank only" in text, text
    assert graph(x, False).shape == (8, 2)

    def differentiated(rows: Any, by_hand: bool) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(rows))
        variables = model.trainable_variables
        return tape.gradient(loss, variables) if by_hand else loss

    # In a later call, too, not only where the step is traced.
    step_of_tape = smp.step(differentiated)
    step_of_tape(x, False)
    text = error_of(step_of_tape, x, True)
    assert "tf.GradientTape does not see layers of other ranks" in text, text

    @smp.step
    def named(rows: Any) -> Any:
        loss = tf.reduce_sum(model(rows))
        gradients = optimizer.get_gradients(loss, model.trainable_variables)
        return Named(gradients, gradients[0], gradients[2], loss)

    def check(rows: Any) -> Any:
        made = named(rows)
        assert isinstance(made, Named)
        there, missing = (made.second, made.first) if rank else (made.first, made.second)
        assert list(there.outputs[0].shape) == ([3, 2] if rank else [3, 3])
        assert missing == [None, None]
        assert len(made.loss.outputs) == 2
        return [one.accumulate() for one in made.gradients]

    for one, other in zip(check(x), tf.function(check)(x), strict=True):
        np.testing.assert_array_equal(one, other)

    factor = tf.Variable(1.0, trainable=False)
    multiplied = smp.step(lambda rows: tf.reduce_sum(model(rows)) * 0 + factor)

    @tf.function
    def in_order(value: Any) -> Any:
        factor.assign(value)
        made = multiplied(x).reduce_mean()
        factor.assign(-1.0)
        return made

    assert [float(in_order(tf.constant(float(n)))) for n in range(20)] == list(range(20))

    signed = smp.step(input_signature=[tf.TensorSpec([None, 3])])(lambda rows: model(rows))
    expected_rows = signed(x).merge()
    begun = time.monotonic()
    text = error_of(signed, *([x, x] if rank else [x]))
    assert "too many positional arguments" in text, text
    assert time.monotonic() - begun < 30
    merged = tf.function(lambda rows: signed(rows).merge())
    for made in (merged(x), merged(tf.cast(x, tf.float64)), signed(x.numpy().tolist()).merge()):
        np.testing.assert_allclose(made, expected_rows, rtol=1e-6)

    scaled = tf.keras.mixed_precision.LossScaleOptimizer(tf.keras.optimizers.SGD(0.1))
    text = error_of(
        smp.step(
            lambda rows: scaled.get_gradients(tf.reduce_sum(model(rows)), model.trainable_variables)
        ),
        x,
    )
    assert "a LossScaleOptimizer would skip other steps on each rank" in text, text
    with pytest.raises(TypeError, match=r"no arguments \['non_split_input'\]"):
        smp.step(non_split_input=["x"])
    smp.step(autograph=False, jit_compile=None)(lambda rows: rows)
    model.compile("sgd", "mse")
    for refused in (model.fit, model.train_on_batch):
        text = error_of(refused, x, x[:, :2])
        assert "SMPUsageError: model.fit and model.train_on_batch cannot train" in text, text

    smp.shutdown()
    model = model_of(smp, tf, microbatches=4)
    text = error_of(compiled, x, False)
    assert "was traced before smp.shutdown()" in text, text
    assert len(step(x, False).outputs) == 4
    smp.shutdown()
    deadline = time.monotonic() + 20
    while any(thread.name == "smp-task" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@jobs.BOTH_KERAS
def test_steps(env: Any) -> None:
    jobs.run(steps, "2", env=env, timeout=120)


def slow() -> None:
    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp
    from smddp.modelparallel.tensorflow.channel import Channel

    take = Channel.take

    def late(self: Any, block: bool) -> Any:
        time.sleep(0.2)
        return take(self, block)

    model = model_of(smp, tf, partitions=3)
    model.three = tf.keras.layers.Dense(2)
    if smp.rank() == 2:
        Channel.take = late
    assert smp.step(lambda rows: model.three(model(rows)))(tf.ones((4, 3))).merge().shape == (4, 2)
    smp.shutdown()


def test_shutdown_waits_for_the_end_of_a_step() -> None:
    jobs.run(slow, "3", timeout=60)


def left_before() -> None:
    """Leaves the job before smp, after a step and after one that has failed; begins again."""
    import tensorflow as tf

    import smdistributed.dataparallel.tensorflow as sdp
    import smdistributed.modelparallel.tensorflow as smp
    from smddp.modelparallel.tensorflow import job

    for fails in (False, True, False):
        model = model_of(smp, tf)

        def call(rows: Any, bad: bool, model: Any = model) -> Any:
            if bad and tf.executing_eagerly():
                raise KeyError("this step only")
            return model(rows)

        step = smp.step(call)
        assert step(tf.ones((4, 3)), False).merge().shape == (4, 2)
        if fails:
            assert "this step only" in error_of(step, tf.ones((4, 3)), True)
        sdp.shutdown()
        smp.shutdown()
        assert not smp.is_initialized()
        assert not sdp.is_initialized()
    smp.init(TWO, timeout=60)

    def stop() -> None:
        raise KeyError("a function of shutdown")

    job.at_shutdown(stop)
    assert "a function of shutdown" in error_of(smp.shutdown)
    assert not smp.is_initialized()
    model = model_of(smp, tf)
    assert smp.step(lambda rows: model(rows))(tf.ones((4, 3))).merge().shape == (4, 2)
    smp.shutdown()


def test_smp_shutdown_after_the_job_was_left() -> None:
    jobs.run(left_before, "2", timeout=100)


def unsaved(folder: str) -> list[str]:
    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp

    model = model_of(smp, tf)
    smp.step(lambda rows: model(rows))(tf.ones((4, 3)))
    place = Path(folder)
    found = []
    good = smp.CheckpointManager(smp.Checkpoint(model=model), f"{place}/good")
    assert good.save() == "ckpt-1"
    bad = smp.CheckpointManager(smp.Checkpoint(model=model), f"{place}/bad")
    if smp.rank() == 1:
        (place / "bad").mkdir()
        (place / "bad" / "partition_1").touch()
        (place / "good" / "partition_1" / "division.json").write_text("[]")
    smp.barrier()
    found.append(error_of(bad.save))
    found.append(error_of(good.restore))
    if smp.rank() == 0:
        (place / "model").touch()
    smp.barrier()
    found.append(error_of(model.save_model, f"{place}/model"))
    smp.barrier()
    last = smp.CheckpointManager(smp.Checkpoint(model=model), f"{place}/last", max_to_keep=1)
    assert (last.save(), last.save()) == ("ckpt-1", "ckpt-2")
    assert not list(place.glob("last/*/ckpt-1.*"))
    save = tf.train.CheckpointManager.save
    if smp.rank() == 1:
        tf.train.CheckpointManager.save = None
    assert "NoneType" in error_of(last.save)
    tf.train.CheckpointManager.save = save
    assert (last.restore(), last.save(), last.restore()) == ("ckpt-2", "ckpt-3", "ckpt-3")
    assert not list(place.glob("last/*/ckpt-2.*"))
    smp.shutdown()
    return found


def test_a_rank_that_cannot_save_or_restore(tmp_path: Path) -> None:
    first, second = jobs.run(unsaved, "2", str(tmp_path), timeout=120)
    assert "SMPPeerError: CheckpointManager.save has failed on rank 1" in first[0], first[0]
    assert "partition_1" in second[0], second[0]
    assert "SMPPeerError: CheckpointManager.restore has failed on rank 1" in first[1], first[1]
    assert "SMPPartitionError" in second[1], second[1]
    assert "SMPPeerError" not in first[2] != "nothing", first[2]
    assert "SMPPeerError: save_model has failed on rank 0" in second[2], second[2]
    assert json.loads((tmp_path / "good" / "partition_0" / "division.json").read_text())


def resumed(folder: str) -> None:
    """Goes on from a checkpoint with a new model and a new optimizer, as a new process does."""
    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp

    kinds = tf.keras.optimizers

    def begin(optimizer: Any) -> tuple[Any, Any, Any]:
        model = model_of(smp, tf)

        @smp.step
        def step(rows: Any) -> Any:
            loss = tf.reduce_sum(model(rows) ** 2)
            return loss, optimizer.get_gradients(loss, model.trainable_variables)

        def train() -> list[Any]:
            _, gradients = step(tf.ones((4, 3)))
            gradients = [one.accumulate() for one in gradients]
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return [np.array(variable) for variable in model.variables]

        step(tf.ones((4, 3)))
        checkpoint = smp.Checkpoint(model=model, optimizer=optimizer)
        return train, smp.CheckpointManager(checkpoint, place), model

    classes = [kinds.Adam]
    if os.environ.get("TF_USE_LEGACY_KERAS"):
        classes.append(kinds.legacy.Adam)
    for kind in classes:
        place = f"{folder}/{kind.__module__}"
        train, manager, _ = begin(kind(0.1))
        train()
        train()
        manager.save()
        expected = train()
        smp.shutdown()
        train, manager, _ = begin(kind(0.1))
        assert manager.restore() == "ckpt-1"
        for one, other in zip(train(), expected, strict=True):
            np.testing.assert_array_equal(one, other)
        manager.save(7)
        smp.shutdown()
        # A run that begins anew, in the same folder, and is interrupted.
        train, manager, model = begin(kind(0.1))
        expected = train()
        assert manager.save() == "ckpt-1"
        train()
        assert manager.restore() == "ckpt-1"
        for variable, other in zip(model.variables, expected, strict=True):
            np.testing.assert_array_equal(np.array(variable), other)
        smp.shutdown()
        _, manager, model = begin(kinds.SGD(0.1))
        before = [np.array(variable) for variable in model.variables]
        said = error_of(manager.restore)
        assert "'optimizer' has more variables in the checkpoint" in said, said
        for one, other in zip(model.variables, before, strict=True):
            np.testing.assert_array_equal(np.array(one), other)
        smp.shutdown()


@jobs.BOTH_KERAS
def test_a_checkpoint_has_the_state_of_the_optimizer(env: Any, tmp_path: Path) -> None:
    jobs.run(resumed, "2", str(tmp_path), env=env, timeout=120)


# --- values ---------------------------------------------------------------------------------------


def of_complex_numbers(distributed: bool) -> Any:
    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp

    dense = tf.keras.layers.Dense
    base, partition = tf.keras.Model, contextlib.nullcontext
    if distributed:
        config = {"microbatches": 1, "auto_partition": False, "default_partition": 0}
        smp.init({**TWO, **config}, timeout=60)
        base, partition = smp.DistributedModel, smp.partition
    tf.keras.utils.set_random_seed(3)

    class Complex(tf.keras.layers.Layer):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = dense(3)

        def call(self, x: Any) -> Any:
            return tf.complex(self.inner(tf.math.real(x)), tf.math.imag(x))

    class Model(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.first = dense(3)
            with partition(1):
                self.second = Complex()

        def call(self, x: Any) -> Any:
            x = self.first(x)
            return tf.abs(self.second(tf.complex(x, 2.0 * x)))

    model, x = Model(), tf.reshape(tf.range(12.0), (4, 3))
    if not distributed:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x))
        return [one.numpy() for one in tape.gradient(loss, model.trainable_variables)]
    optimizer = tf.keras.optimizers.SGD(0.1)

    @smp.step
    def gradients(rows: Any) -> Any:
        return optimizer.get_gradients(tf.reduce_sum(model(rows)), model.trainable_variables)

    made = [one.accumulate().numpy() for one in gradients(x)]
    smp.shutdown()
    return made


def test_complex_numbers_have_gradients() -> None:
    (expected,) = jobs.run(of_complex_numbers, "1", False)
    first, second = jobs.run(of_complex_numbers, "2", True)
    for one, other in zip([*first, *second], expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


# --- Ctrl-C ---------------------------------------------------------------------------------------


def interrupted(how: str) -> tuple[str, float]:
    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp

    signal.signal(signal.SIGINT, signal.default_int_handler)
    replicas = {"partitions": 1, "horovod": True} if how == "replicas" else {}
    model = model_of(smp, tf, **replicas)
    x = tf.ones((4, 3))
    step = smp.step(lambda rows: model(rows))
    call = step if how == "replicas" else tf.function(lambda rows: step(rows).merge())
    call(x)
    smp.barrier()
    sent: list[float] = []

    def send() -> None:
        time.sleep(1)
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    if smp.rank() == 0:
        model.seconds = 4 if how == "replicas" else 0
        threading.Thread(target=send).start()
    elif how == "graph":
        time.sleep(6)
    began = time.monotonic()
    text = error_of(call, x)
    return text, time.monotonic() - (sent or [began])[0]


@pytest.mark.slow
def test_ctrl_c_in_a_graph() -> None:
    (text, seconds), _ = jobs.run(interrupted, "2", "graph", timeout=120)
    assert text.startswith("KeyboardInterrupt"), text
    assert seconds < 5, seconds


@pytest.mark.slow
def test_ctrl_c_on_one_replica() -> None:
    (text, _), (other, seconds) = jobs.run(interrupted, "2", "replicas", timeout=120)
    assert text.startswith("KeyboardInterrupt"), text
    assert "SMPPeerError: the step has failed on rank 0: KeyboardInterrupt" in other, other
    assert seconds < 30, seconds


# --- objects --------------------------------------------------------------------------------------


def objects() -> None:
    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp

    assert not smp.is_initialized()
    text = error_of(smp.init, {**TWO, "tensor_parallel_degree": 2})
    assert "tensor_parallel_degree is for PyTorch" in text, text
    smp.init({**TWO, "horovod": True}, timeout=60)
    assert smp.is_initialized()
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("smddp.modelparallel").addHandler(handler)
    smp.init({**TWO, "horovod": True})
    smp.init()
    assert not said
    smp.init({**TWO, "horovod": True, "microbatches": 4})
    (text,) = said
    assert "a second call does nothing; this configuration is not used: microbatches=4" in text
    me = smp.rank()
    part, replica = me % 2, me // 2
    assert (me, smp.size()) == (int(os.environ["RANK"]), 4)
    assert (smp.local_rank(), smp.local_size()) == (me % 2, 2)
    assert smp.instance_id() == replica
    assert (smp.pp_rank(), smp.pp_size()) == (smp.mp_rank(), smp.mp_size()) == (part, 2)
    assert (smp.dp_rank(), smp.dp_size()) == (smp.rdp_rank(), smp.rdp_size()) == (replica, 2)
    assert (smp.tp_rank(), smp.tp_size()) == (0, 1)
    assert smp.get_world_group() == [0, 1, 2, 3]
    assert smp.get_pp_group() == smp.get_mp_group() == [2 * replica, 2 * replica + 1]
    assert smp.get_dp_group() == smp.get_rdp_group() == [part, part + 2]
    assert smp.get_tp_group() == [me]
    for group, members in (
        (smp.WORLD, smp.get_world_group()),
        (smp.MP_GROUP, smp.get_mp_group()),
        (smp.PP_GROUP, smp.get_pp_group()),
        (smp.DP_GROUP, smp.get_dp_group()),
        (smp.RDP_GROUP, smp.get_rdp_group()),
        (smp.TP_GROUP, smp.get_tp_group()),
    ):
        assert smp.allgather({"rank": me}, group) == [{"rank": one} for one in members]
        if me == members[0]:
            smp.broadcast(("from", me, tf.constant([1.0, 2.0]).numpy()), group)
        else:
            text, sender, array = smp.recv_from(members[0], smp.WORLD_RANK)
            assert (text, sender, array.tolist()) == ("from", members[0], [1.0, 2.0])
        smp.barrier(group)
    for kind, number, other in (
        (smp.PP_RANK, smp.pp_rank(), me ^ 1),
        (smp.MP_RANK, smp.mp_rank(), me ^ 1),
        (smp.DP_RANK, smp.dp_rank(), me ^ 2),
        (smp.RDP_RANK, smp.rdp_rank(), me ^ 2),
    ):
        if number == 0:
            smp.send(collections.OrderedDict(me=me), 1, kind)
        else:
            assert smp.recv_from(0, kind) == collections.OrderedDict(me=other)
    assert "cannot send to itself" in error_of(smp.send, 1, me, smp.WORLD_RANK)
    assert "cannot send to itself" in error_of(smp.send, 1, 0, smp.TP_RANK)
    assert "SMPInitializationError" in error_of(smp.recv_from, 9, smp.WORLD_RANK)
    for kind in ("mp", "pp", "dp", "rdp", "tp"):
        getattr(smp, f"{kind}_barrier")()
    smp.shutdown()
    assert not smp.is_initialized()


def test_ranks_and_objects() -> None:
    jobs.run(objects, "2x2", timeout=120)
