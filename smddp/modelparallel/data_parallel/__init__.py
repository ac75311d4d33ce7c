"""Makes the gradients of a step, equal on all replicas of the model."""
