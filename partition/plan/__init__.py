"""What a plan is, and the facts it is made from."""
