"""Functions in place of torch's."""
