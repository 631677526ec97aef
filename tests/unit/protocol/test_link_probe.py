"""Both ends of a probe over real links: what it finds, and how it ends when one of them misbehaves.

Times are only checked for being possible: how fast a link is, is not for a test to say.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine

import numpy as np
import pytest

from edge.errors import NetworkError
from edge.protocol.link_probe import answer_probe, glance, probe
from edge.protocol.measurements import MAX_MESSAGE_BYTES, LinkGlance, LinkTimes
from edge.transport import ChannelClosedError, Link, PeerLostError, TransportError
from tests.support.transport_pairs import LINK_KINDS, link_pair

PATIENCE_S = 60.0


async def measure(link: Link, *, limit_s: float = PATIENCE_S) -> LinkTimes:
    return await probe(link, small_bytes=1000, large_bytes=300_000, limit_s=limit_s)


@pytest.mark.parametrize("kind", LINK_KINDS)
def test_a_link_is_measured_in_both_directions(kind: str) -> None:
    async def both(near: Link, far: Link) -> LinkTimes:
        async with asyncio.timeout(PATIENCE_S):
            times, _ = await asyncio.gather(measure(near), answer_probe(far, limit_s=PATIENCE_S))
        return times

    with link_pair(kind) as (near, far):
        start_s = time.perf_counter()
        times = asyncio.run(both(near, far))
        whole_s = time.perf_counter() - start_s
        assert 0 < times.latency_s < whole_s
        for rate in (times.there_bytes_per_s, times.back_bytes_per_s):
            assert 0 < rate < float("inf")
        with pytest.raises(TransportError):
            near.send(np.zeros(1))


class Throttled:
    """A link over which each byte that is sent takes its time, by a clock of its own.

    Nothing else takes any, but that the clock moves on whenever it is read.
    """

    def __init__(self, inner: Link, seconds_per_byte: float) -> None:
        self._inner = inner
        self._seconds_per_byte = seconds_per_byte
        self._now_s = 0.0
        self.peer = inner.peer
        self.receive = inner.receive
        self.exchange = inner.exchange
        self.close = inner.close
        self.state = inner.state

    def send(self, array: np.ndarray) -> None:
        self._now_s += array.nbytes * self._seconds_per_byte
        self._inner.send(array)

    def clock(self) -> float:
        self._now_s += 1e-6
        return self._now_s


async def measure_by_its_clock(near: Throttled, far: Link) -> LinkTimes:
    probing = probe(
        near, small_bytes=1000, large_bytes=300_000, limit_s=PATIENCE_S, clock=near.clock
    )
    times, _ = await asyncio.gather(probing, answer_probe(far, limit_s=PATIENCE_S))
    return times


def test_a_slow_direction_is_told_from_a_fast_one() -> None:
    """1 MB/s one way; back, only the order to send takes time."""
    with link_pair("memory") as (near, far):
        times = asyncio.run(measure_by_its_clock(Throttled(near, 1e-6), far))
    assert times.there_bytes_per_s == pytest.approx(1e6, rel=0.02)
    assert times.back_bytes_per_s > 1e9
    assert times.latency_s == pytest.approx(0.5e-3, rel=0.6)


class Lossy(Throttled):
    """A link that takes a fifth of a second longer for some echoes: they were sent again."""

    def __init__(self, inner: Link, *, every: int) -> None:
        super().__init__(inner, 1e-9)
        self._every = every
        self._sent = 0

    def send(self, array: np.ndarray) -> None:
        self._sent += array.nbytes == 1000
        if array.nbytes == 1000 and not self._sent % self._every:
            self._now_s += 0.2
        super().send(array)


@pytest.mark.parametrize(("every", "is_unsteady"), [(10, True), (45, False)])
def test_a_link_that_loses_messages_is_unsteady(every: int, is_unsteady: bool) -> None:
    """50 echoes after the 10 of a glance. One that is late is no sign of a bad link."""
    with link_pair("memory") as (near, far):
        times = asyncio.run(measure_by_its_clock(Lossy(near, every=every), far))
    assert times.is_unsteady is is_unsteady
    if is_unsteady:
        assert times.latency_s == pytest.approx(0.2 * 4 / 49 / 2, rel=0.1)
    else:
        assert times.latency_s < 1e-3


@pytest.mark.parametrize("kind", LINK_KINDS)
def test_a_far_end_that_says_nothing_is_given_up(kind: str) -> None:
    with link_pair(kind) as (near, _far):
        with pytest.raises(NetworkError, match="second did not answer over its link"):
            asyncio.run(measure(near, limit_s=0.1))
        with pytest.raises(TransportError):
            near.send(np.zeros(1))


@pytest.mark.parametrize("kind", LINK_KINDS)
def test_a_near_end_that_gives_no_orders_is_given_up(kind: str) -> None:
    with link_pair(kind) as (near, far):
        asyncio.run(answer_probe(far, limit_s=0.1))
        with pytest.raises(PeerLostError):
            near.receive(np.zeros(1))


@pytest.mark.parametrize("kind", LINK_KINDS)
def test_whoever_is_cancelled_leaves_no_thread_waiting(kind: str) -> None:
    async def cancel(work: Callable[[], Coroutine[None, None, object]]) -> None:
        task = asyncio.create_task(work())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with link_pair(kind) as (near, far):
        asyncio.run(cancel(lambda: answer_probe(far, limit_s=PATIENCE_S)))
        asyncio.run(cancel(lambda: measure(near)))
        with pytest.raises(ChannelClosedError):
            far.receive(np.zeros(1))


def test_a_link_that_breaks_after_small_messages_is_still_known() -> None:
    """What was measured until then is the answer."""

    def answer_small_ones(link: Link) -> None:
        order, message = np.zeros(2, np.int64), np.zeros(1000, np.uint8)
        while True:
            link.receive(order)
            if order[1] != message.nbytes:
                link.close()
                return
            link.receive(message)
            link.send(message)

    async def both(near: Link, far: Link) -> LinkTimes:
        times, _ = await asyncio.gather(measure(near), asyncio.to_thread(answer_small_ones, far))
        return times

    with link_pair("tcp") as (near, far):
        times = asyncio.run(both(near, far))
    assert times.latency_s > 0
    assert times.there_bytes_per_s == times.back_bytes_per_s > 0


@pytest.mark.parametrize(
    "order",
    [(4, 1), (-1, 5), (0, 0), (1, -1), (2, MAX_MESSAGE_BYTES + 1), (1 << 60, 1 << 60)],
    ids=str,
)
def test_orders_that_cannot_be_close_the_link(order: tuple[int, int]) -> None:
    with link_pair("tcp") as (near, far):
        near.send(np.asarray(order, np.int64))
        asyncio.run(answer_probe(far, limit_s=PATIENCE_S))
        with pytest.raises(PeerLostError):
            near.receive(np.zeros(1))


def test_an_order_of_another_size_closes_the_link() -> None:
    with link_pair("tcp") as (near, far):
        near.send(np.zeros(5, np.int64))
        asyncio.run(answer_probe(far, limit_s=PATIENCE_S))
        with pytest.raises(PeerLostError):
            near.receive(np.zeros(1))


@pytest.mark.parametrize("kind", LINK_KINDS)
def test_a_glance_is_a_few_messages(kind: str) -> None:
    async def both(near: Link, far: Link) -> LinkGlance:
        async with asyncio.timeout(PATIENCE_S):
            glancing = glance(near, small_bytes=1000, limit_s=PATIENCE_S)
            found, _ = await asyncio.gather(glancing, answer_probe(far, limit_s=PATIENCE_S))
        return found

    with link_pair(kind) as (near, far):
        found = asyncio.run(both(near, far))
        assert all(each.low_s > 0 for each in (found.echo_s, found.there_s, found.back_s))
        with pytest.raises(TransportError):
            near.send(np.zeros(1))


def test_a_glance_tells_a_slow_direction() -> None:
    with link_pair("memory") as (near, far):
        throttled = Throttled(near, 1e-6)

        async def both() -> LinkGlance:
            glancing = glance(
                throttled, small_bytes=1000, limit_s=PATIENCE_S, clock=throttled.clock
            )
            found, _ = await asyncio.gather(glancing, answer_probe(far, limit_s=PATIENCE_S))
            return found

        found = asyncio.run(both())
    assert found.there_s.middle_s > 0.03
    assert found.back_s.middle_s < 0.001


class HeldUpOnce(Throttled):
    """A link whose first medium message takes a fifth of a second: it was lost, and sent again."""

    def __init__(self, inner: Link) -> None:
        super().__init__(inner, 1e-9)
        self._is_first = True

    def send(self, array: np.ndarray) -> None:
        if self._is_first and array.nbytes > 1000:
            self._is_first = False
            self._now_s += 0.2
        super().send(array)


def test_a_message_that_was_lost_is_not_the_middle_of_a_glance() -> None:
    with link_pair("memory") as (near, far):
        held_up = HeldUpOnce(near)

        async def both() -> LinkGlance:
            glancing = glance(held_up, small_bytes=1000, limit_s=PATIENCE_S, clock=held_up.clock)
            found, _ = await asyncio.gather(glancing, answer_probe(far, limit_s=PATIENCE_S))
            return found

        found = asyncio.run(both())
    assert found.there_s.high_s > 0.03
    assert found.there_s.middle_s < 0.001


def test_a_glance_at_nobody_is_an_error() -> None:
    with link_pair("tcp") as (near, far):
        far.close()
        with pytest.raises(NetworkError, match="did not answer over its link"):
            asyncio.run(glance(near, small_bytes=8, limit_s=PATIENCE_S))
