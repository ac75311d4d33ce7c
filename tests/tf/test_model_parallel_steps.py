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
    np.testing.assert_allclose(found, result, rtol=1e-6)
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
