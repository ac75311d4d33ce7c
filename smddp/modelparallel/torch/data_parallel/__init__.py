"""Makes the gradients of a step: sums over microbatches, then means over replicas."""
