"""Product with a float32 weight."""
