"""GPU peers: a shard as Triton kernels, which are interpreted without a GPU."""
