"""Who runs what: pure functions from facts to a plan."""
