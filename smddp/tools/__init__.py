"""The commands of `smddp`, and what they share. This package imports nothing by itself."""
