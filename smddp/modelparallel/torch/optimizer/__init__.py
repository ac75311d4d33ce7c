"""The optimizer of a divided model: its state, half precision, norms and clipping."""
