"""Reading values that came from outside, strictly: exact fields, exact types, bounded sizes.

A Reader notes every problem and goes on with a harmless stand-in, so that one pass finds them all;
what it returned is only meaningful when `problems` stayed empty.
"""

from collections.abc import Sequence
from typing import Final

from edge.partition.plan.facts import LONGEST_NAME, is_name

LARGEST_INTEGER = 2**31 - 1
"""No layer, head, column, vocabulary row or version number comes near."""

_MISSING: Final = object()
"""Stands for a field that was reported missing already, so that it is not reported twice."""


class Reader:
    """Turns JSON values into Python ones; `where` names the value in the problems it notes."""

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
        """A string that is safe as a name."""
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
            self.problems.append(f"{where} starts at {start}, behind its stop at {stop}.")
            return range(0)
        return range(start, stop)


def _is_index(value: object) -> bool:
    # bool is an int to Python and is not a number to JSON.
    return type(value) is int and 0 <= value <= LARGEST_INTEGER


def _shown(value: object) -> str:
    """A short text for any value, whatever its size or depth."""
    match value:
        case None | bool():
            return {None: "null", True: "true", False: "false"}[value]
        case str():
            return repr(value) if len(value) <= 40 else f"{value[:40]!r}…"
        case int():
            # Very long integers refuse to become text at all.
            return str(value) if abs(value) < 2**63 else "an enormous number"
        case float():
            return repr(value)
        case list():
            # Contents are shown only where they are plain numbers: nesting can be bottomless.
            if len(value) <= 4 and all(type(item) is int for item in value):
                return f"[{', '.join(map(_shown, value))}]"
            return f"a list of {len(value):,}"
        case dict():
            return "an object"
    return f"a {type(value).__name__}"
