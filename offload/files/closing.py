"""The base of all files and uses that must be closed: a context manager."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self


class Closing(ABC):
    """An object that is closed at the end of its `with` block, also after an error."""

    __slots__ = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None: ...
