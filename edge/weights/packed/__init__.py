"""Quantised folders: GPTQ, AWQ, compressed-tensors, MLX, FP8, MXFP4, NVFP4, and our own blocks."""
