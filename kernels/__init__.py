"""Operators, each computed once for every kind of device."""
