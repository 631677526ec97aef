"""Products with weights in the blocks of GGUF files, as they are there."""
