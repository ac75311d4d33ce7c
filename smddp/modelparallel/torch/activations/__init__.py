"""Runs modules without keeping their activations, and moves what is saved out of memory."""
