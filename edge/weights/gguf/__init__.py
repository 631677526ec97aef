"""GGUF files: their blocks, and the mapping of names and shapes to those of a family."""
