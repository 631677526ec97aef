"""Which files are kept for the next time, and which go first?"""
