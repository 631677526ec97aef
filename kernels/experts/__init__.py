"""Experts: each row goes through the few blocks that a router chooses for it."""
