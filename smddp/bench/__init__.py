"""Measures collectives and training steps, several backends side by side: `python -m smddp.bench`.

The speed of a machine changes from minute to minute. Therefore the backends take turns, size by
size, and the ratios between them matter more than the times. Every size is also checked for wrong
elements.
"""

from smddp.bench.measure import Case, Measurement, Timing

__all__ = ["Case", "Measurement", "Timing"]
