"""Data parallelism for TensorFlow under its original import name."""

from smddp_tensorflow import *  # noqa: F403
from smddp_tensorflow import __all__ as __all__
