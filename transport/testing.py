"""Faulty channels and links for tests: wrappers that fail on purpose.

They wrap any implementation, which needs no test hooks.
"""

import enum
from typing import Any

from numpy.typing import NDArray

from edge.transport.channel import Channel
from edge.transport.errors import PeerLostError
from edge.transport.frame import (
    OF_ALL_FRAMES,
    Admit,
    Frame,
    FrameLimits,
    LimitsOf,
    admit_all,
    no_other_limits,
)
from edge.transport.link import Link, LinkState


class Fault(enum.Enum):
    """The kind of failure."""

    LOSE = enum.auto()
    """The connection breaks: from this call on, each side has lost the other."""
    DROP = enum.auto()
    """Nothing sent arrives, in this call and all later ones: the peer falls silent."""
    TRUNCATE = enum.auto()
    """One message arrives at half its size; later ones are complete."""


class _Countdown:
    """Counts the calls that pass: all calls, or only sending ones if only these can fail."""

    def __init__(self, fault: Fault, after_calls: int) -> None:
        self._fault = fault
        self._calls_left = after_calls

    def next_fault(self, *, sends: bool) -> Fault | None:
        """The fault of this call, if any."""
        if not sends and self._fault is not Fault.LOSE:
            return None
        self._calls_left -= 1
        if self._calls_left == -1 or (self._calls_left < 0 and self._fault is not Fault.TRUNCATE):
            return self._fault
        return None


class FaultyLink:
    """A link that passes calls through until ``after_calls`` of them. Owns ``inner``.

    ``LOSE`` counts and affects every call, the other faults sending ones; an exchange is one.
    """

    def __init__(self, inner: Link, fault: Fault, *, after_calls: int = 0) -> None:
        self.peer = inner.peer
        self._inner = inner
        self._countdown = _Countdown(fault, after_calls)

    def send(self, array: NDArray[Any]) -> None:
        fault = self._next_fault(sends=True)
        if fault is None:
            self._inner.send(array)
        elif fault is Fault.TRUNCATE:
            self._inner.send(_half(array))

    def receive(self, into: NDArray[Any]) -> None:
        self._next_fault(sends=False)
        self._inner.receive(into)

    def exchange(self, outgoing: NDArray[Any], incoming: NDArray[Any]) -> None:
        fault = self._next_fault(sends=True)
        if fault is Fault.DROP:
            self._inner.receive(incoming)
        else:
            self._inner.exchange(_half(outgoing) if fault else outgoing, incoming)

    def state(self) -> LinkState:
        return self._inner.state()

    def close(self) -> None:
        self._inner.close()

    def _next_fault(self, *, sends: bool) -> Fault | None:
        fault = self._countdown.next_fault(sends=sends)
        if fault is Fault.LOSE:
            self._inner.close()
            raise PeerLostError(self.peer, "the connection was broken on purpose")
        return fault


class FaultyChannel:
    """A channel that passes calls through until ``after_calls`` of them. Owns ``inner``.

    ``LOSE`` counts and affects every call, the other faults ``send``; ``TRUNCATE`` halves the
    payload.
    """

    def __init__(self, inner: Channel, fault: Fault, *, after_calls: int = 0) -> None:
        self.peer = inner.peer
        self.host = inner.host
        self.remote_hello = inner.remote_hello
        self._inner = inner
        self._countdown = _Countdown(fault, after_calls)

    @property
    def received_bytes(self) -> int:
        return self._inner.received_bytes

    async def send(self, frame: Frame) -> None:
        fault = await self._next_fault(sends=True)
        if fault is None:
            await self._inner.send(frame)
        elif fault is Fault.TRUNCATE:
            payload = bytes(frame.payload)
            await self._inner.send(Frame(frame.kind, frame.header, payload[: len(payload) // 2]))

    async def receive(
        self,
        limits_of: LimitsOf = no_other_limits,
        admit: Admit = admit_all,
        *,
        most: FrameLimits = OF_ALL_FRAMES,
    ) -> Frame:
        await self._next_fault(sends=False)
        return await self._inner.receive(limits_of, admit, most=most)

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def _next_fault(self, *, sends: bool) -> Fault | None:
        fault = self._countdown.next_fault(sends=sends)
        if fault is Fault.LOSE:
            await self._inner.aclose()
            raise PeerLostError(self.peer, "the connection was broken on purpose")
        return fault


def _half(array: NDArray[Any]) -> NDArray[Any]:
    flat = array.reshape(-1)
    return flat[: flat.size // 2]
