"""Token embedding, also of a slice of the vocabulary."""
