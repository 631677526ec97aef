"""A probe of a link: latency and bandwidth, measured between both of its ends.

One end commands, the other obeys. A command is two numbers, an order and the bytes of the message
that follows, so that both know its size. The link is of the kind that carries hidden states.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from edge.concurrency.blocking import run_blocking
from edge.errors import NetworkError, ProtocolError
from edge.protocol.measurements import MAX_MESSAGE_BYTES, LinkGlance, LinkTimes, Span
from edge.transport import Link, TransportError

PROBE_LIMIT_S = 5.0
"""Seconds until a probe ends with its measurements so far."""

_ECHO, _TAKE, _GIVE, _END = range(4)

_GLANCE_ECHOES = 10
_GLANCE_MESSAGES = 5
_LEAST_GLANCE_MESSAGES = 3
"""Least messages of a glance, so that a lost and repeated message is not the median."""
_GLANCE_BYTES = 32 << 10
"""Size of a glance's message: 3 ms at 100 Mbit/s."""
_GLANCE_SPAN_S = 0.03
"""Seconds after which a glance begins no further message in a direction."""

_ECHOES = 50
_LEAST_ECHOES = 5
_ECHO_SPAN_S = 0.25
_MOST_ECHO_SPAN_S = 2.0
"""Time limit including late echoes: a single late one means nothing, so several are needed."""

_LATE = 10
"""Multiple of the usual echo's time. Repeating a lost packet takes a fifth of a second."""

_UNSTEADY = 1.5
_UNSTEADY_S = 1e-3
"""A link is unsteady if the mean echo takes this multiple of the median, or this much longer."""

_LARGE_SPAN_S = 0.2
_MOST_LARGE = 9
_GROWTH = 4
_ENOUGH_S = 0.05
"""A message that takes this long is large enough to show the rate."""

Clock = Callable[[], float]
"""Seconds since any fixed moment."""


async def answer_probe(link: Link, *, limit_s: float = PROBE_LIMIT_S) -> None:
    """Obey the commands on the link. Close it at the end or after `limit_s`."""
    timer = asyncio.get_running_loop().call_later(limit_s, link.close)
    try:
        await run_blocking(lambda: _obey(link), stop=link.close)
    except (TransportError, ProtocolError):
        pass  # the commanding end is gone or broke the protocol, and reports it itself
    finally:
        timer.cancel()
        link.close()


async def probe(
    link: Link,
    *,
    small_bytes: int,
    large_bytes: int,
    limit_s: float = PROBE_LIMIT_S,
    clock: Clock = time.perf_counter,
) -> LinkTimes:
    """Time messages of these sizes by `clock`, then close the link.

    Ends within `limit_s`, however slow the link is.

    Raises NetworkError if not even a glance succeeds in that time.
    """
    found = _Found()

    def command() -> None:
        _glance(link, small_bytes, found, clock)
        _command(link, small_bytes, large_bytes, found, clock)

    await _within(limit_s, link, command, found)
    return found.times(small_bytes)


async def glance(
    link: Link,
    *,
    small_bytes: int,
    limit_s: float = PROBE_LIMIT_S,
    clock: Clock = time.perf_counter,
) -> LinkGlance:
    """The beginning of `probe` alone, which takes a few milliseconds. Raises NetworkError."""
    found = _Found()

    def command() -> None:
        _glance(link, small_bytes, found, clock)
        _order(link, _END, 0)

    await _within(limit_s, link, command, found)
    return found.glance


def times_of(seen: LinkGlance, *, small_bytes: int) -> LinkTimes:
    """Rough times of a link that was only glanced at with small messages of this size."""
    medium_bytes, echo_s = max(small_bytes, _GLANCE_BYTES), seen.echo_s.middle_s
    there, back = (
        medium_bytes / max(span.middle_s - echo_s, 0.1 * span.middle_s)
        for span in (seen.there_s, seen.back_s)
    )
    latency_s = echo_s / 2 - small_bytes * (1 / there + 1 / back) / 2
    return LinkTimes(
        latency_s=max(latency_s, echo_s / 4),
        there_bytes_per_s=there,
        back_bytes_per_s=back,
        glance=seen,
    )


async def _within(limit_s: float, link: Link, command: Callable[[], None], found: _Found) -> None:
    """Command the other end from a thread, then close the link."""
    timer = asyncio.get_running_loop().call_later(limit_s, link.close)
    try:
        await run_blocking(command, stop=link.close)
    except TransportError as error:
        if not found.glanced:
            raise NetworkError(
                f"{link.peer} did not answer over its link ({error})",
                remedy="check the network there",
            ) from error
    finally:
        timer.cancel()
        link.close()


class _Found:
    """Measurements so far: the link may break, or the time be over, at any moment."""

    def __init__(self) -> None:
        self.glanced: list[float] = []
        self.glanced_one_way: dict[int, list[float]] = {_TAKE: [], _GIVE: []}
        """Seconds by order, as in `large`."""
        self.echoes_s: list[float] = []
        self.large: dict[int, tuple[int, list[float]]] = {}
        """{_TAKE or _GIVE: (bytes of a message, round-trip seconds)}."""

    @property
    def glance(self) -> LinkGlance:
        there_s, back_s = self.glanced_one_way.values()
        return LinkGlance(
            echo_s=_span(self.glanced),
            there_s=_span(there_s or self.glanced),
            back_s=_span(back_s or self.glanced),
        )

    @property
    def echo_s(self) -> float:
        return statistics.median(self.echoes_s or self.glanced)

    @property
    def late_s(self) -> float:
        """Mean excess of echoes if messages are lost or delayed; otherwise 0.

        Without the slowest one, which may have any cause.
        """
        if len(self.echoes_s) < _LEAST_ECHOES:
            return 0.0
        mean_s = statistics.fmean(sorted(self.echoes_s)[:-1])
        late_s = mean_s - self.echo_s
        return late_s if mean_s > _UNSTEADY * self.echo_s and late_s > _UNSTEADY_S else 0.0

    def times(self, small_bytes: int) -> LinkTimes:
        rates = [self._rate(order, small_bytes) for order in (_TAKE, _GIVE)]
        latency_s = self.echo_s / 2 - small_bytes * sum(1 / rate for rate in rates) / 2
        return LinkTimes(
            # The cost of a message hides the time of its first bytes.
            latency_s=max(latency_s, self.echo_s / 4) + self.late_s / 2,
            there_bytes_per_s=rates[0],
            back_bytes_per_s=rates[1],
            glance=self.glance,
            is_unsteady=self.late_s > 0,
        )

    def _rate(self, order: int, small_bytes: int) -> float:
        """Bandwidth from a large message one way and an empty one back, less the latter's time."""
        size, seconds = self.large.get(order, (0, []))
        if not seconds:
            return small_bytes / (self.echo_s / 2)
        whole_s = statistics.median(seconds)
        return size / max(whole_s - self.echo_s, 0.1 * whole_s)


def _span(seconds: list[float]) -> Span:
    low_s, middle_s, high_s = map(float, np.percentile(seconds, [20, 50, 80]))
    return Span(low_s=low_s, middle_s=middle_s, high_s=high_s)


def _glance(link: Link, small_bytes: int, found: _Found, clock: Clock) -> None:
    """Done first on a new link, so that glances at different links compare."""
    small = np.zeros(small_bytes, np.uint8)
    for _ in range(_GLANCE_ECHOES):
        found.glanced.append(_echo_once(link, small, clock))
    medium = np.zeros(max(small_bytes, _GLANCE_BYTES), np.uint8)
    for order, seconds in found.glanced_one_way.items():
        while len(seconds) < _LEAST_GLANCE_MESSAGES or (
            len(seconds) < _GLANCE_MESSAGES and sum(seconds) < _GLANCE_SPAN_S
        ):
            seconds.append(_one_way(link, order, medium, clock))


def _command(link: Link, small_bytes: int, large_bytes: int, found: _Found, clock: Clock) -> None:
    small = np.zeros(small_bytes, np.uint8)
    end_s = clock() + _ECHO_SPAN_S
    last_s = clock() + _MOST_ECHO_SPAN_S
    while len(found.echoes_s) < _ECHOES:
        if clock() > end_s and len(found.echoes_s) >= _LEAST_ECHOES:
            break
        found.echoes_s.append(took_s := _echo_once(link, small, clock))
        if took_s > _LATE * found.echo_s:
            end_s = min(end_s + took_s, last_s)
    for order in (_TAKE, _GIVE):
        _time_large(link, order, small_bytes, large_bytes, found, clock)
    _order(link, _END, 0)


def _echo_once(link: Link, small: NDArray[np.uint8], clock: Clock) -> float:
    _order(link, _ECHO, small.nbytes)
    start_s = clock()
    link.send(small)
    link.receive(small)
    return clock() - start_s


def _time_large(
    link: Link, order: int, small_bytes: int, large_bytes: int, found: _Found, clock: Clock
) -> None:
    """Grow the messages until they take long enough, then repeat that size a few times."""
    size = min(large_bytes, max(small_bytes, 16 << 10))
    while True:
        buffer = np.zeros(size, np.uint8)
        seconds = _one_way(link, order, buffer, clock)
        found.large[order] = (size, [seconds])
        if size >= large_bytes or seconds > _ENOUGH_S:
            break
        size = min(large_bytes, size * _GROWTH)
    end_s = clock() + _LARGE_SPAN_S - seconds
    while clock() < end_s and len(found.large[order][1]) < _MOST_LARGE:
        found.large[order][1].append(_one_way(link, order, buffer, clock))


def _one_way(link: Link, order: int, buffer: NDArray[np.uint8], clock: Clock) -> float:
    word = np.zeros(1, np.int64)
    start_s = clock()
    _order(link, order, buffer.nbytes)
    if order == _TAKE:
        link.send(buffer)
        link.receive(word)
    else:
        link.receive(buffer)
    return clock() - start_s


def _order(link: Link, what: int, nbytes: int) -> None:
    link.send(np.asarray([what, nbytes], np.int64))


def _obey(link: Link) -> None:
    """Obey commands. Raises ProtocolError for an invalid one."""
    order = np.zeros(2, np.int64)
    buffer = np.zeros(0, np.uint8)
    word = np.zeros(1, np.int64)
    while True:
        link.receive(order)
        what, nbytes = map(int, order)
        if what == _END:
            return
        if what not in _actions or not 0 < nbytes <= MAX_MESSAGE_BYTES:
            raise ProtocolError(f"{link.peer} probes with the order {what}, {nbytes}")
        if buffer.nbytes != nbytes:
            buffer = np.zeros(nbytes, np.uint8)
        _actions[what](link, buffer, word)


def _echo(link: Link, buffer: NDArray[np.uint8], _word: NDArray[np.int64]) -> None:
    link.receive(buffer)
    link.send(buffer)


def _take(link: Link, buffer: NDArray[np.uint8], word: NDArray[np.int64]) -> None:
    link.receive(buffer)
    link.send(word)


def _give(link: Link, buffer: NDArray[np.uint8], _word: NDArray[np.int64]) -> None:
    link.send(buffer)


_actions: dict[int, Callable[[Link, NDArray[np.uint8], NDArray[np.int64]], None]] = {
    _ECHO: _echo,
    _TAKE: _take,
    _GIVE: _give,
}
