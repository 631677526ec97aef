"""Bytes in files: checked, durable, read by position."""
