"""Model parallelism: `core` for both frameworks, `torch` and `tensorflow` on it.

Scripts import one of them under its original name, for instance
`import smdistributed.modelparallel.torch as smp`. This package imports nothing by itself.
"""
