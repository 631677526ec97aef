"""What should run where, and was that right?"""
