"""What is in a checkpoint, in which format?"""
