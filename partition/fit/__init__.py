"""Does a plan fit, and what fits where?"""
