"""Roles of a member: compute for others, have others compute."""

LEND, USE = "lend", "use"
ROLES = (LEND, USE)
