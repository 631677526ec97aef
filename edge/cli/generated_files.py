"""Files that commands generate for other programs: systemd units, shell completion."""

from __future__ import annotations

from pathlib import Path

from edge.errors import RequestError

_MOST_READ_BYTES = 64 << 10


def write_own(place: Path, text: str, *, mark: str, writer: str) -> bool:
    """Write a file that has the line `mark`. Returns False if it was up to date already.

    Raises RequestError if there is a file without the mark, which Edge did not write, and OSError.
    """
    try:
        with place.open("rb") as file:
            found = file.read(_MOST_READ_BYTES)
    except FileNotFoundError:
        found = mark.encode()
    if mark.encode() not in found:
        raise RequestError(
            f"{place} exists already, and was not written by {writer}",
            remedy="move it away, or print the text and copy it from there",
        )
    if found == text.encode():
        return False
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(text.encode())  # as it is compared, also where lines end otherwise
    return True
