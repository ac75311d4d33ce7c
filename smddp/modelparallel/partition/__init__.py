"""Decides where each module lives, and makes that true on a rank."""
