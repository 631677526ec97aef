"""What does a Python user hold?"""
