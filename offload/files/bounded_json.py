"""Untrusted files and JSON, read within bounds.

The size is checked before memory is taken, and the number of values before any value is made.
"""

import contextlib
import gc
import io
import json
import math
import os
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from edge.system.files import open_for_reading

MAX_DEPTH = 64
"""Deepest nesting of lists and objects. Configurations have a few levels."""
MAX_VALUES = 800_000
"""Most values of one file, unless its reader sets a limit. 100,000 tensors need as many."""


def read_file(path: Path, most_bytes: int) -> bytes:
    """The whole file. Raises ValueError if it is longer or no regular file, OSError as `open`."""
    with io.FileIO(path, "rb", opener=open_at_once) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is not a regular file")
        if status.st_size > most_bytes:
            raise ValueError(f"its {status.st_size:,} bytes are more than {most_bytes:,}")
        content = bytearray()
        while part := file.read(status.st_size + 1 - len(content)):
            content += part
            if len(content) > status.st_size:
                raise ValueError("it grew while it was being read")
        return bytes(content)


def open_at_once(path: str, flags: int) -> int:
    """Open without waiting, as `open` would for a pipe."""
    return open_for_reading(path, flags)


def parse_json(text: str | bytes, *, most_values: int = MAX_VALUES) -> Any:
    """The value in `text`; bytes are UTF-8. Raises ValueError, with the cause, for invalid JSON.

    Also refuses JSON on which readers disagree or are slow: a name twice in an object, NaN and
    Infinity, numbers too large for a float, integers of more than 4,300 digits, nesting beyond
    MAX_DEPTH, more than `most_values` values.
    """
    check_values(text, most_values)
    if isinstance(text, bytes):
        text = text.decode()
    try:
        with collector_paused():
            value = json.loads(
                text,
                object_pairs_hook=_object,
                parse_constant=_refuse_constant,
                parse_float=_finite,
            )
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH + 1):
        if not level:
            return value
        level = [
            child
            for each in level
            for child in (each.values() if type(each) is dict else each)
            if type(child) is dict or type(child) is list
        ]
    raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Context without the cyclic garbage collector, which would double the time of large files."""
    paused = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if paused:
            gc.enable()


def check_values(text: str | bytes, most_values: int) -> None:
    """Raises ValueError for JSON that may hold more values. Counts commas and brackets."""
    marks: Sequence[Any] = ",[{" if isinstance(text, str) else (b",", b"[", b"{")
    found = sum(map(text.count, marks))
    if found > most_values:
        raise ValueError(f"its {found:,} values are more than {most_values:,}")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"it holds the name {twice!r:.100} twice")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"it holds {name}, which is no number")


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError(f"it holds {digits:.40}, which is too large a number")
    return number
