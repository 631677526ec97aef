"""How does a plan run on its peers?"""
