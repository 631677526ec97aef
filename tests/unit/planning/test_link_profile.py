"""Which pairs of peers count as unable to link to each other."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from edge.errors import NetworkError
from edge.partition import LinkSpec
from edge.partition.cost.message_times import NO_LINK_S
from edge.planning.link_profile import LinkFacts
from edge.protocol.measurements import LinkGlance, LinkTimes, Probe, Span
from edge.protocol.peer_frames import Describe
from tests.support.peer_infos import peer_info

SPAN = Span(low_s=1e-3, middle_s=1e-3, high_s=1e-3)
TIMES = LinkTimes(
    latency_s=1e-3,
    there_bytes_per_s=1e8,
    back_bytes_per_s=1e8,
    glance=LinkGlance(echo_s=SPAN, there_s=SPAN, back_s=SPAN),
    is_unsteady=False,
)


class Clients:
    """Peers whose first probes fail."""

    def __init__(self, failures: int) -> None:
        self._failures = failures
        self.calls: list[tuple[str, type]] = []

    async def of(self, peer: Any) -> Any:
        async def call(question: Any) -> Any:
            self.calls.append((peer.name, type(question)))
            if isinstance(question, Probe):
                self._failures -= 1
                if self._failures >= 0:
                    raise NetworkError("cannot link to b: it could not be reached")
                return TIMES
            return None

        return SimpleNamespace(call=call)


def links(clients: Clients, notes: list[str]) -> tuple[LinkSpec, ...]:
    inquiry: Any = SimpleNamespace(
        clients=clients,
        spec=SimpleNamespace(hidden_size=64),
        cache=SimpleNamespace(link=lambda *_: None, keep_link=lambda *_: None),
        refresh=True,
        on_rough=None,
        may_measure=lambda *_: True,
        on_progress=lambda _: None,
        on_note=notes.append,
    )
    return asyncio.run(LinkFacts(inquiry).between([peer_info("a"), peer_info("b")]))


@pytest.mark.parametrize("failures", [0, 1])
def test_a_device_that_is_late_once_is_not_unreachable(failures: int) -> None:
    notes: list[str] = []
    clients = Clients(failures)
    assert {link.latency_s for link in links(clients, notes)} == {1e-3}
    assert notes == []
    assert clients.calls == [("a", Probe), ("b", Describe)] * failures + [("a", Probe)]


def test_two_failures_are_told_with_their_reason() -> None:
    notes: list[str] = []
    assert {link.latency_s for link in links(Clients(2), notes)} == {NO_LINK_S}
    assert notes == ["a and b cannot share a model: cannot link to b: it could not be reached"]
