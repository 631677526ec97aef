"""Attention without a mask and without a cache: all rows see all."""
