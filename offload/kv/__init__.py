"""Where are keys and values: in memory, on disk, found again?"""
