"""Files that commands write where other programs look for them."""

from __future__ import annotations

from pathlib import Path

from edge.errors import RequestError

_MOST_READ_BYTES = 64 << 10


def write_own(place: Path, text: str, *, mark: str, writer: str) -> bool:
    """Write the file, with a line `mark` in it. False: it was as it should be already.

    Raises RequestError for one without the mark, which somebody else wrote, and OSError.
    """
    try:
        with place.open("rb") as file:
            found = file.read(_MOST_READ_BYTES)
    except FileNotFoundError:
        found = mark.encode()
    if mark.encode() not in found:
        raise RequestError(
            f"{place} is there already, and not written by {writer}",
            remedy="move it away, or take over what you want of what is printed instead",
        )
    if found == text.encode():
        return False
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text, encoding="utf-8")
    return True
