"""How fast is this device?"""
