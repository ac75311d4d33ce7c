"""Data parallelism for TensorFlow under its original import name."""

from smddp.tensorflow import *  # noqa: F403
from smddp.tensorflow import __all__ as __all__
