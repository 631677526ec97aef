"""How do a thread and the loop meet?"""
