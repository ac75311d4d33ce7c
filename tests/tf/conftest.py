"""These tests run in an environment with TensorFlow (`make test-tensorflow`), and not in others."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
collect_ignore_glob = [] if importlib.util.find_spec("tensorflow") else ["test_*.py"]


def pytest_configure(config: Any) -> None:
    """Makes known the markers; pyproject.toml is not read, because it needs other plugins."""
    config.addinivalue_line("markers", "slow: left out of `make test`")
    config.addinivalue_line("markers", "exhaustive: for `make test-all` only")
