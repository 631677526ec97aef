"""Linear attention: a state that each token changes, and reads, in place of keys and values."""
