"""How are bytes read and written, checked and durable?"""
