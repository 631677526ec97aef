"""The keywords of JSON schemas that hold nested schemas."""

from __future__ import annotations

BY_NAME = ("properties", "patternProperties")
"""Keywords with an object of schemas by property name."""

NAMED = ("$defs", "definitions")
"""Keywords with an object of schemas for references."""

IN_ORDER = ("prefixItems",)
"""Keywords with a list of schemas of items in order."""

CHOICES = ("anyOf", "oneOf", "allOf")
"""Keywords with a list of schemas of the same value."""

HELD = ("items", "additionalProperties")
"""Keywords with a single schema."""

MOST_DEPTH = 64
"""Most levels of a schema that is read."""
