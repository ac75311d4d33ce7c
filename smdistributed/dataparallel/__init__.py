"""Data parallelism under its original import name."""

__version__ = "2.5.0"
