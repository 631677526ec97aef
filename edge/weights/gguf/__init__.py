"""GGUF files: their blocks, and how their names and shapes become those of a family."""
