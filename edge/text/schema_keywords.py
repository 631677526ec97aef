"""Where a JSON schema holds others."""

from __future__ import annotations

BY_NAME = ("properties", "patternProperties")
"""In an object, of parts that have such names."""

NAMED = ("$defs", "definitions")
"""In an object, for references."""

IN_ORDER = ("prefixItems",)
"""In a list, of parts in that order."""

CHOICES = ("anyOf", "oneOf", "allOf")
"""In a list, of the same part."""

HELD = ("items", "additionalProperties")
"""As they are."""
