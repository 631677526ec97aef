"""One question to every peer of a model, and what each of them answers. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


class Answers(Generic[Asked, Answer]):
    """Complete when each of those asked has answered; none of them stands in for another."""

    def __init__(self, asked: Iterable[Asked]) -> None:
        """asked: whoever can be told from the others by `==` and hashed."""
        self._awaited = set(asked)
        self.given: list[Answer] = []
        """So far, in the order they came."""

    def add(self, who: Asked, answer: Answer) -> None:
        """Raises ValueError for one who was not asked, or has answered."""
        if who not in self._awaited:
            raise ValueError("an answer too many")
        self._awaited.remove(who)
        self.given.append(answer)

    @property
    def are_complete(self) -> bool:
        return not self._awaited
