"""What is kept of a forward pass, and what is computed again."""
