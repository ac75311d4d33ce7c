"""Which activations of a forward pass are kept, and which are computed again."""
