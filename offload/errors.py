"""Errors of kept bytes, by who is to blame.

    StoreError
    ├── StoreMissingError      a file or tensor that is asked for is not there
    ├── StoreCorruptError      bytes are there, but not the ones that were promised
    ├── StoreUnsupportedError  a valid file in a format this program does not read
    └── StoreFullError         no room: a size limit, or the disk itself

An argument that no store could honour (a row range outside the tensor) is the caller's mistake and
raises ValueError instead.
"""


class StoreError(Exception):
    """Base of every error of this package; the message names the cause and a remedy."""


class StoreMissingError(StoreError):
    """A file or tensor that is asked for is not there."""


class StoreCorruptError(StoreError):
    """Bytes are there, but not the ones that were promised."""


class StoreUnsupportedError(StoreError):
    """A valid file in a format that this program does not read."""


class StoreFullError(StoreError):
    """There is no room; `bytes_missing` more would have been enough (0: unknown)."""

    def __init__(self, message: str, *, bytes_missing: int = 0) -> None:
        super().__init__(message)
        self.bytes_missing = bytes_missing
