"""Functions that replace those of torch."""
