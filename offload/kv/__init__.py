"""Where keys and values are: in memory, on disk, found again."""
