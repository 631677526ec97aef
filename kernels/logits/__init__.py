"""What some models make of their head's products."""
