"""Model parallelism under its original import name."""

__version__ = "1.15.0"
