"""Strict reading of values from outside: exact fields, exact types, bounded sizes.

A Reader notes every problem and goes on with a harmless placeholder, so that one pass finds all of
them. Its results are only meaningful while `problems` is empty.
"""

from collections.abc import Sequence
from typing import Final

from edge.partition.plan.facts import LONGEST_NAME, is_name

LARGEST_INTEGER = 2**31 - 1
"""No layer, head, column, vocabulary row or version number comes near."""

_MISSING: Final = object()
"""Placeholder for a missing field, so that it is reported once."""


class Reader:
    """Converts JSON values to Python ones. `where` names the value in a problem."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def fields(self, value: object, names: Sequence[str], where: str) -> tuple[object, ...]:
        """The values of exactly these fields of an object, in the order of `names`."""
        if value is _MISSING:
            return (_MISSING,) * len(names)
        if not isinstance(value, dict):
            self.problems.append(f"{where} must be an object, not {_shown(value)}.")
            return (_MISSING,) * len(names)
        missing = [name for name in names if name not in value]
        self.problems += [f"{where} lacks the field {name!r}." for name in missing]
        unknown = [key for key in value if key not in names]
        if unknown:
            shown = ", ".join(_shown(key) for key in unknown[:4])
            self.problems.append(f"{where} has {len(unknown)} unknown field(s): {shown}.")
        return tuple(value.get(name, _MISSING) for name in names)

    def items(self, value: object, where: str, *, most: int) -> list[object]:
        """The items of a list of at most `most`."""
        if value is _MISSING:
            return []
        if not isinstance(value, list):
            self.problems.append(f"{where} must be a list, not {_shown(value)}.")
            return []
        if len(value) > most:
            self.problems.append(f"{where} has {len(value):,} items; {most:,} is the most.")
            return []
        return value

    def name(self, value: object, where: str) -> str:
        """A string that `is_name` accepts."""
        if value is _MISSING:
            return ""
        if not isinstance(value, str) or not is_name(value):
            self.problems.append(
                f"{where} must be a string of 1 to {LONGEST_NAME} characters without line breaks"
                f" or control characters, not {_shown(value)}."
            )
            return ""
        return value

    def integer(self, value: object, where: str) -> int:
        """A whole number from 0 to LARGEST_INTEGER."""
        if value is _MISSING:
            return 0
        if not _is_index(value):
            self.problems.append(
                f"{where} must be a whole number from 0 to {LARGEST_INTEGER:,},"
                f" not {_shown(value)}."
            )
            return 0
        assert isinstance(value, int)
        return value

    def bounds(self, value: object, where: str) -> range:
        """A half-open range, written [start, stop]."""
        if value is _MISSING:
            return range(0)
        if not isinstance(value, list) or len(value) != 2 or not all(map(_is_index, value)):
            self.problems.append(
                f"{where} must be [start, stop] in whole numbers from 0 to {LARGEST_INTEGER:,},"
                f" not {_shown(value)}."
            )
            return range(0)
        start, stop = value
        if start > stop:
            self.problems.append(f"{where} starts at {start}, after its stop at {stop}.")
            return range(0)
        return range(start, stop)


def _is_index(value: object) -> bool:
    # In Python bool is a subclass of int; in JSON it is no number.
    return type(value) is int and 0 <= value <= LARGEST_INTEGER


def _shown(value: object) -> str:
    """A short text for any value, whatever its size or depth."""
    match value:
        case None | bool():
            return {None: "null", True: "true", False: "false"}[value]
        case str():
            return repr(value) if len(value) <= 40 else f"{value[:40]!r}…"
        case int():
            # Python refuses to convert very long integers to text.
            return str(value) if abs(value) < 2**63 else "an enormous number"
        case float():
            return repr(value)
        case list():
            # Only lists of plain numbers are shown, because lists can be nested without limit.
            if len(value) <= 4 and all(type(item) is int for item in value):
                return f"[{', '.join(map(_shown, value))}]"
            return f"a list of {len(value):,}"
        case dict():
            return "an object"
    return f"a {type(value).__name__}"
