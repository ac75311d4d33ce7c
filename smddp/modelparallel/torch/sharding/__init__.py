"""Sharded data parallelism: parameters and their gradients are divided over replicas."""
