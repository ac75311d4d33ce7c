"""Measures collectives and training steps, several backends side by side: `python -m smddp.bench`.

Machines differ from minute to minute, so backends are interleaved size by size within one run, and
the ratios between them are what to look at. Every size is also checked for wrong elements.
"""

from smddp.bench.measure import Case, Measurement, Timing

__all__ = ["Case", "Measurement", "Timing"]
