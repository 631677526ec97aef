"""Links: the interface of the data plane, which moves arrays between compute threads.

Knows bytes and one neighbour; knows nothing of ranks, models or asyncio. Each message is preceded
by its size (8 bytes, big-endian), which the receiver compares with its own buffer's before it reads
on: a message never decides how much memory is written.
"""

from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkState:
    """The state of one end of a link."""

    sent: int
    """Messages that this end has begun to send."""
    received: int
    """Messages that have arrived here completely."""
    silent_s: float
    """Seconds since something arrived while a call waits for it. 0 if no call waits, if bytes wait
    to be read, or if the system does not tell."""


class Link(Protocol):
    """Blocking messages of a known size to and from one neighbour.

    One thread may send while another receives; ``exchange`` does both. Arrays are C-contiguous
    and of any dtype; an array of no bytes is a message too. After ``PeerLostError`` or
    ``ProtocolError`` the link is spent and every later call raises the same again.
    """

    @property
    def peer(self) -> str:
        """Printable name of the other end, for messages."""

    def send(self, array: Array) -> None:
        """Send the bytes of ``array``. May wait until the peer receives them.

        Raises:
            ValueError: the array is not C-contiguous; nothing was sent.
            ChannelClosedError: this side closed the link, also while this call waited.
            PeerLostError: the peer closed it, died, or took nothing for the link's timeout.
        """

    def receive(self, into: Array) -> None:
        """Wait for one message and put its bytes into ``into``.

        Raises:
            ValueError: ``into`` is not C-contiguous or cannot be written; nothing was read.
            ProtocolError: the message has another size than ``into``, whose content is then
                undefined.
            ChannelClosedError: this side closed the link, also while this call waited.
            PeerLostError: the peer closed it, died, or sent nothing for the link's timeout.
        """

    def exchange(self, outgoing: Array, incoming: Array) -> None:
        """Send ``outgoing`` and receive ``incoming``, of any sizes, without deadlock.

        Both sides call this, or one sends and receives in any order. Raises what :meth:`send` and
        :meth:`receive` raise. The arrays must not overlap.
        """

    def state(self) -> LinkState:
        """The state of this end, from any thread, also after close."""

    def close(self) -> None:
        """Close this side from any thread; may be called again."""
