"""Decides where each module lives, and applies the decision on a rank."""
