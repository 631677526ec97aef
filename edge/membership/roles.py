"""What a member may do: compute for others, and have others compute for it."""

LEND, USE = "lend", "use"
ROLES = (LEND, USE)
