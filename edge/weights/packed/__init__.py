"""Folders that other programs quantised: GPTQ, AWQ, compressed-tensors, MLX, FP8, MXFP4, NVFP4."""
