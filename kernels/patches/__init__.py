"""Patches: from pixels to values, and from blocks of patches to rows."""
