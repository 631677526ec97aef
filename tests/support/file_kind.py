"""One kind of file, for those who change it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Kind:
    """A sound one, and who reads it."""

    sound: bytes
    read: Callable[[bytes], object]
    has_own_keys: bool = False
    """Made anew with each `Files`."""
