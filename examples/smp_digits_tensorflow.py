"""A convolutional network for scanned digits, on two ranks, with Keras.

SM_HP_MP_PARAMETERS='{"partitions": 2, "microbatches": 2, "pipeline": "interleaved",
"optimize": "memory", "horovod": true}' smddprun -n 2 examples/smp_digits_tensorflow.py
"""

# ruff: noqa: D101, D102, D103, UP008  written as scripts for the original library are

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from tensorflow.keras.layers import Conv2D, Dense, Flatten

import smdistributed.modelparallel.tensorflow as smp

smp.init()

tf.keras.utils.set_random_seed(1)

digits = load_digits()
images = (digits.images[..., np.newaxis] / 16).astype(np.float32)
dataset = tf.data.Dataset.from_tensor_slices((images, digits.target))
dataset = dataset.shard(smp.dp_size(), smp.dp_rank()).batch(64, drop_remainder=True)


class MyModel(smp.DistributedModel):
    def __init__(self):
        super(MyModel, self).__init__()
        self.conv = Conv2D(32, 3, activation="relu")
        self.flatten = Flatten()
        self.dense1 = Dense(128)
        self.dense2 = Dense(10)

    def call(self, x):
        x = self.conv(x)
        x = self.flatten(x)
        x = self.dense1(x)
        return self.dense2(x)


model = MyModel()
loss_obj = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = tf.keras.optimizers.Adam()


@smp.step
def forward_backward(images, labels):
    predictions = model(images, training=True)
    loss = loss_obj(labels, predictions)
    grads = optimizer.get_gradients(loss, model.trainable_variables)
    return grads, loss


losses = []
for images, labels in dataset.take(20):
    gradients, loss = forward_backward(images, labels)
    gradients = [gradient.accumulate() for gradient in gradients]
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    losses.append(float(loss.reduce_mean()))
if smp.rank() == 0:
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
