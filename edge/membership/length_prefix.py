"""Encoding of a list of byte strings, each with a length prefix."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from edge.errors import RequestError

LENGTH_BYTES = 4


def joined(parts: Iterable[bytes]) -> bytes:
    return b"".join(len(part).to_bytes(LENGTH_BYTES) + part for part in parts)


def parted(content: bytes, what: str) -> Iterator[bytes]:
    """The byte strings that `joined` got. Raises RequestError, naming `what`, if the content is cut
    off."""
    begin = 0
    while begin < len(content):
        start = begin + LENGTH_BYTES
        end = start + int.from_bytes(content[begin:start])
        if end > len(content):
            raise RequestError(f"{what} cannot be read: its end is missing")
        yield content[start:end]
        begin = end
