"""How long will a plan take?"""
