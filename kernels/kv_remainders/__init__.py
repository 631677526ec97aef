"""Attention over codes that is exact where it matters most: at the first and the newest tokens."""
