"""Weights that do not fit, brought in ahead of their use."""
