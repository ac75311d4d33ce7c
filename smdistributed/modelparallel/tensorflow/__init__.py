"""Model parallelism for TensorFlow under its original import name."""

from smddp_tensorflow.modelparallel import *  # noqa: F403
from smddp_tensorflow.modelparallel import __all__ as __all__
