"""What every part uses: errors, nested values, buffers, files. Knows nothing of ranks."""
