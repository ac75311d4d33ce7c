"""Starts ranks: the command smddprun, and the variables that torch reads under mpirun and srun.

This package imports nothing by itself. What `import torch` needs of it is in `environment`.
"""
