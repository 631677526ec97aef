"""Keys and values of heads, made of what all of them share."""
