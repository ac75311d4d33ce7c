"""Runs modules where they live, microbatch by microbatch."""
