"""Layout and rounding of keys and values in a cache."""
