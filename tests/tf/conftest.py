"""These tests run in an environment with TensorFlow (`make test-tensorflow`), and not in others."""

import importlib.util
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
collect_ignore_glob = [] if importlib.util.find_spec("tensorflow") else ["test_*.py"]
