"""Caches of weights on disk, with eviction."""
