"""How do weights that do not fit come in before their use?"""
