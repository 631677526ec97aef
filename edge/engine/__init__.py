"""What does one shard do in a step?"""
