"""What model parallelism for PyTorch and for TensorFlow have in common. It imports neither."""
