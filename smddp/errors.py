"""The errors of a collective that fails, by the name that scripts import."""

from smddp.torch.errors import *  # noqa: F403
from smddp.torch.errors import __all__ as __all__
