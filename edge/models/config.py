"""Checked reading of `config.json` values, with common error sentences."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from reprlib import repr as shown
from typing import Any

import numpy as np

from edge.errors import CheckpointError
from edge.models.parts import MAX_SIZE

_MISSING = object()
LEAST_FLOAT32 = float(np.finfo(np.float32).tiny)
_LARGEST_FLOAT32 = float(np.finfo(np.float32).max)


class Config:
    """The values of one `config.json`; every getter names the field in its error.

    names: the fields' names in the original file, for errors.
    """

    def __init__(
        self, values: Mapping[str, Any], *, source: str, names: Mapping[str, str] | None = None
    ) -> None:
        self.values = values
        self.source = source
        self._names = names or {}

    def integer(self, name: str, default: Any = _MISSING) -> int:
        value = self._get(name, default)
        if type(value) is not int:
            raise self.error(f"{self._shown(name)} must be an integer, not {shown(value)}")
        return value

    def size(self, name: str, default: Any = _MISSING, *, most: int = MAX_SIZE) -> int:
        """A positive integer that is safe to allocate by."""
        value = self.integer(name, default)
        if not 1 <= value <= most:
            raise self.error(f"{self._shown(name)} must lie in 1..{most}, not {shown(value)}")
        return value

    def number(self, name: str, default: Any = _MISSING) -> float:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(f"{self._shown(name)} must be a number, not {shown(value)}")
        if not abs(value) <= sys.float_info.max:  # also NaN, and integers too large for a float
            raise self.error(f"{self._shown(name)} must be a finite number")
        return float(value)

    def positive(self, name: str, default: Any = _MISSING) -> float:
        """A number within float32's range."""
        value = self.number(name, default)
        if not value > 0:
            raise self.error(f"{self._shown(name)} must be positive, not {value}")
        if not LEAST_FLOAT32 <= value <= _LARGEST_FLOAT32:
            raise self.error(f"{self._shown(name)} must be a number that 32 bits hold, not {value}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.error(f"{self._shown(name)} must be true or false, not {shown(value)}")
        return value

    def mapping(self, name: str) -> Mapping[str, Any]:
        value = self.values.get(name)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise self.error(f"{self._shown(name)} must be an object, not {shown(value)}")
        return value

    def filled(self, values: Mapping[str, Any]) -> Config:
        """The configuration with defaults for absent fields."""
        return Config({**values, **self.values}, source=self.source, names=self._names)

    def changed(self, **values: Any) -> Config:
        """The configuration with these values replaced."""
        return Config({**self.values, **values}, source=self.source, names=self._names)

    def error(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.source}: {problem}")

    def _shown(self, name: str) -> str:
        return self._names.get(name, name)

    def _get(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is not None:
            return value
        if default is _MISSING:
            raise self.error(f"{self._shown(name)} is missing")
        return default
