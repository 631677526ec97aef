"""Weight offload: reads weights that do not fit into memory before their use."""
