"""Runs the steps: calls of modules on other ranks, the tasks of a rank, and their messages."""
