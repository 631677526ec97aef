"""How do peers find each other?"""
