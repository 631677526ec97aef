"""Functions between two products: silu and gelu."""
