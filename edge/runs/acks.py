"""Acks: the answers of a plan's peers to one question about a request. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

Peer = TypeVar("Peer")
Answer = TypeVar("Answer")


class Acks(Generic[Peer, Answer]):
    """One kind of question about requests. Complete when each peer has answered for itself.

    Peers can be told from each other by `==` and hashed.
    """

    def __init__(self) -> None:
        self._awaited: dict[str, set[Peer]] = {}
        self._given: dict[str, list[Answer]] = {}

    def ask(self, request: str, peers: Iterable[Peer]) -> None:
        """Record that the peers are asked. Raises ValueError if the request is asked already."""
        if request in self._awaited:
            raise ValueError("the earlier question about this request is not answered yet")
        self._awaited[request] = set(peers)
        self._given[request] = []

    def add(self, request: str, peer: Peer, answer: Answer) -> list[Answer] | None:
        """Record an answer. Returns all answers in order of arrival, or None while some are
        missing.

        Raises ValueError for a peer that was not asked or has answered before.
        """
        awaited = self._awaited.get(request)
        if awaited is None:
            raise ValueError("nothing was asked about this request")
        if peer not in awaited:
            raise ValueError("this peer was not asked about the request, or has answered already")
        awaited.remove(peer)
        self._given[request].append(answer)
        if awaited:
            return None
        del self._awaited[request]
        return self._given.pop(request)
