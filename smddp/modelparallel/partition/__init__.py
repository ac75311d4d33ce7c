"""Decides where each module lives."""
