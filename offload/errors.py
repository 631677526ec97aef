"""Errors of stores, by their cause.

    StoreError
    ├── StoreMissingError      a requested file or tensor does not exist
    ├── StoreCorruptError      bytes are damaged or are not the expected ones
    ├── StoreUnsupportedError  a valid file in a format this program does not read
    └── StoreFullError         no room: a size limit, or the disk itself

Invalid arguments, such as a row range outside the tensor, raise ValueError instead.
"""


class StoreError(Exception):
    """Base of every error of this package; the message names the cause and a remedy."""


class StoreMissingError(StoreError):
    """A requested file or tensor does not exist."""


class StoreCorruptError(StoreError):
    """Bytes are damaged or are not the expected ones."""


class StoreUnsupportedError(StoreError):
    """A valid file in a format that this program does not read."""


class StoreFullError(StoreError):
    """There is no room; `bytes_missing` more would have been enough (0: unknown)."""

    def __init__(self, message: str, *, bytes_missing: int = 0) -> None:
        super().__init__(message)
        self.bytes_missing = bytes_missing
