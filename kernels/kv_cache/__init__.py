"""How keys and values are laid out and rounded in a cache."""
