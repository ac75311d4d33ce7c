"""What every other folder uses: errors, nested values, buffers, files. It knows no ranks."""
