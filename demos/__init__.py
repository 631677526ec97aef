"""Bundled demos: one idea per file, each checks what it shows."""
