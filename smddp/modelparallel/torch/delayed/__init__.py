"""Parameters that get memory and values only on the ranks where they live."""
