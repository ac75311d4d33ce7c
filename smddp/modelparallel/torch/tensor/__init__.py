"""Tensor parallelism: layers whose parameters are divided over the ranks of a tp group."""
