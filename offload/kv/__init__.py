"""Keys and values: the pool, tiers, and prefix caches in memory and on disk."""
