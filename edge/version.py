"""The version of Edge."""

__version__ = "0.1.0"
