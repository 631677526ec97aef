"""LayerNorm, fused with the residual addition before it."""
