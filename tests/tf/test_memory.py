"""Many steps need no more memory than few."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jobs
import pytest

# Bytes that many steps may take for good. A step that keeps a tensor, or a Python object, keeps
# more than 100 bytes: 1 MiB in 10⁴ steps, and ten times that in RSS where each takes a page.
HEAP, RESIDENT = 1 << 18, 2 << 20


class Mallinfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def in_use() -> dict[str, int]:
    """Returns what this process has in use; all but the last are bytes."""
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = Mallinfo
    heap = libc.mallinfo2()
    shared = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/dev/shm/" in line or "/memfd:" in line:
            begin, end = (int(part, 16) for part in line.split()[0].split("-"))
            shared += end - begin
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "heap": heap.uordblks + heap.hblkhd,
        "resident": int(status["VmRSS"].split()[0]) << 10,
        "shared": shared,
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


def growth(step: Callable[[], Any], count: int) -> dict[str, int]:
    """Returns what `count` steps take for good, after as many that fill caches and pools."""
    for _ in range(count // 2):
        step()
    before = in_use()
    for _ in range(count - count // 2):
        step()
    return {name: value - before[name] for name, value in in_use().items()}


def data_parallel(compiled: bool) -> dict[str, int]:
    import tensorflow as tf

    import smdistributed.dataparallel.tensorflow as sdp

    sdp.init()
    weights = [tf.Variable(tf.ones((8, 16)) / 8), tf.Variable(tf.ones((16, 1)) / 16)]
    x = tf.random.normal((4, 8))

    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.nn.relu(x @ weights[0]) @ weights[1] - 1))
        gradients = sdp.DistributedGradientTape(tape).gradient(loss, weights)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.assign_sub(0.01 * gradient)
        return sdp.allreduce(loss, 0, 2) + sdp.allreduce(loss, 1, 2) + sdp.oob_allreduce(loss)

    found = growth(tf.function(step) if compiled else step, 10_000)
    sdp.shutdown()
    return found


def model_parallel() -> dict[str, int]:
    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp

    smp.init({"partitions": 2, "microbatches": 2})

    class Model(smp.DistributedModel):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = tf.keras.layers.Dense(16), tf.keras.layers.Dense(1)

        def call(self, x: Any) -> Any:
            return self.two(self.one(x))

    model, optimizer = Model(), tf.keras.optimizers.SGD(0.01)
    x = tf.random.normal((4, 8))

    @smp.step
    def forward_backward(x: Any) -> Any:
        loss = tf.reduce_mean(tf.square(model(x, training=True) - 1))
        return optimizer.get_gradients(loss, model.trainable_variables), loss

    def step() -> None:
        gradients, loss = forward_backward(x)
        means = [gradient.accumulate() for gradient in gradients]
        optimizer.apply_gradients(zip(means, model.trainable_variables, strict=True))
        loss.reduce_mean()

    found = growth(step, 1000)
    smp.shutdown()
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("job", "arguments"),
    [
        pytest.param(data_parallel, [False], id="eager"),
        pytest.param(data_parallel, [True], id="graph"),
        pytest.param(model_parallel, [], id="model-parallel"),
    ],
)
def test_memory_does_not_grow(job: Callable[..., dict[str, int]], arguments: list[Any]) -> None:
    for found in jobs.run(job, "2", *arguments, timeout=900):
        assert found["heap"] <= HEAP, found
        assert found["resident"] <= RESIDENT, found
        assert found["shared"] == 0, found
        assert found["descriptors"] <= 0, found
