"""Runs torch's own tests of a distributed backend with "smddp".

torch ships the tests (`torch/testing/_internal/distributed/distributed_test.py`); this package has
no copy of them. See docs/torch-suite.md, and `python -m torch_suite --help` with tests/ on
PYTHONPATH.
"""
