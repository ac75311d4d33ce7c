"""Torch's own tests of a distributed backend, run against "smddp".

torch ships them (`torch/testing/_internal/distributed/distributed_test.py`); nothing of them is
copied here. See docs/torch-suite.md, and `python -m torch_suite --help` with tests/ on PYTHONPATH.
"""
