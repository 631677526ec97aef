"""Learned positions of the patches of a tile."""
