"""Saves and loads a training job."""
