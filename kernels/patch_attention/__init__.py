"""Attention of all patches of a tile to each other."""
