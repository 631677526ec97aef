"""What is one answer, from what was asked to its last token?"""
