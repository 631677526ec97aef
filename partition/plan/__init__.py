"""What is a plan, and which facts is it made from?"""
