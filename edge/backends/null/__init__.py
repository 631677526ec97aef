"""How is a shard followed without computing it?"""
