"""Attention of all heads to one row for each token, of which keys and values are made."""
