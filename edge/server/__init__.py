"""How is a model used over HTTP?"""
