"""Causal grouped-query attention over a KV cache."""
