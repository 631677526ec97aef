"""How bytes move between peers."""
