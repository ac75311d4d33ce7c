"""Trains on two nodes of two ranks as one process does; fails unless the models are equal.

tests/wheels/run.sh starts the ranks, where nothing but TensorFlow and the wheel is installed.
The first argument says how collectives have to run: `compiled`, or `numpy` without a compiler.
"""

import os
import sys
import warnings
from typing import Any

# One machine plays two nodes.
os.environ["SMDDP_NODE_ID"] = str(int(os.environ["RANK"]) // 2)

import tensorflow as tf

import smdistributed.dataparallel.tensorflow as sdp


def train(rank: int, size: int, distributed: bool) -> list[Any]:
    """Returns the variables after ten steps with every `size`-th example, from `rank` on."""
    tf.keras.utils.set_random_seed(1)
    model = tf.keras.Sequential([tf.keras.layers.Dense(512, "relu"), tf.keras.layers.Dense(8)])
    model.build((None, 64))
    optimizer = tf.keras.optimizers.SGD(0.1)
    source = tf.random.Generator.from_seed(2)

    @tf.function
    def step(inputs: tf.Tensor) -> None:
        labels = tf.argmax(inputs[:, :8], 1)
        tape = tf.GradientTape()
        if distributed:
            tape = sdp.DistributedGradientTape(tape)
        with tape:
            losses = tf.keras.losses.sparse_categorical_crossentropy(labels, model(inputs), True)
            loss = tf.reduce_mean(losses)
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    for _ in range(10):
        step(source.normal((32, 64))[rank::size])
    return [variable.numpy() for variable in model.variables]


if __name__ == "__main__":
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        sdp.init()
    texts = " ".join(str(one.message) for one in said)
    how = "numpy" if "there is no C++ compiler" in texts else "compiled"
    assert how == sys.argv[1], (how, texts)
    ours, single = train(sdp.rank(), sdp.size(), True), train(0, 1, False)
    for mine, other in zip(ours, single, strict=True):
        tf.debugging.assert_near(mine, other, rtol=1e-5, atol=1e-6)
    assert "torch" not in sys.modules
    if sdp.rank() == 0:
        print(f"TensorFlow {tf.__version__}, {how} operations: the models are equal")
