"""How is a family of models described?"""
