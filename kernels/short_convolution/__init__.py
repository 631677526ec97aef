"""A convolution over a few last tokens, gated before and after."""
