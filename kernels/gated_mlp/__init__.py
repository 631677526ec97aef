"""The gated feed-forward product."""
