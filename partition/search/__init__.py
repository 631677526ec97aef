"""Which plan takes least?"""
