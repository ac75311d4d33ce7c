"""Importing this registers the c10d backend "smddp"."""

import smddp  # noqa: F401
