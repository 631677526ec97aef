"""The runtime a user imports."""
