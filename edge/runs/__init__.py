"""Running a plan on its peers: shipping, loading, steps, failover."""
