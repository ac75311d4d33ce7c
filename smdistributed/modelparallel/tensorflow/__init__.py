"""Model parallelism for TensorFlow under its original import name."""

from smddp.modelparallel.tensorflow import *  # noqa: F403
from smddp.modelparallel.tensorflow import __all__ as __all__
