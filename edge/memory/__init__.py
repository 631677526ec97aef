"""How many bytes, and who holds them?"""
