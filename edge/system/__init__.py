"""What do operating systems do differently, and how is it done where one of them cannot?"""
