"""Stands for the compiled module until the first import, which puts that in its place."""

import importlib.machinery
import importlib.util
import sys

from smddp.torch import _load

_loader = importlib.machinery.ExtensionFileLoader(__name__, str(_load.check()))
_spec = importlib.util.spec_from_file_location(__name__, _loader.path, loader=_loader)
assert _spec is not None
_module = importlib.util.module_from_spec(_spec)
_loader.exec_module(_module)
# The import system returns what is here when this file has run.
sys.modules[__name__] = _module
