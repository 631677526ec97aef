"""Folders whose weights another program has quantised: GPTQ, AWQ, compressed-tensors, MLX, FP8 and
MXFP4."""
