"""GPU peers: a shard as Triton kernels, interpreted where there is no GPU."""
