"""Transport errors, by which side caused them.

::

    TransportError
    ├── ChannelClosedError         we closed it: the caller's own aclose() or close()
    ├── PeerLostError              they closed it, died, or were silent for too long
    │   └── UnwantedError          they closed it when they saw our certificate
    ├── ProtocolError              what arrived, or was to be sent, is not what the protocol allows
    │   └── VersionMismatchError   the other side speaks another version of the protocol
    ├── RefusedError               the other side is not, or no longer, a member
    │   ├── UnknownHereError       it does not know us: perhaps it has an older key of our cluster
    │   └── OutdatedError          we had an older key, and have got the current one
    └── AddressError               an address that cannot be read, listened on or connected to

The operating system's own errors are mapped onto this tree once, where a socket is touched;
nothing above this package sees an ``OSError`` from the network.
"""


class TransportError(Exception):
    """Base of every error that this package raises about the network."""


class ChannelClosedError(TransportError):
    """The channel, link or collective was closed on this side."""


class PeerLostError(TransportError):
    """The other side closed the connection, died, or was silent for too long."""

    def __init__(self, peer: str, reason: str) -> None:
        # Both go to the base class, so that the error can be copied and raised again.
        super().__init__(peer, reason)
        self.peer = peer
        self.reason = reason

    def __str__(self) -> str:
        return f"lost {self.peer}: {self.reason}"


class UnwantedError(PeerLostError):
    """The other side closed the connection after it saw our certificate, without an answer."""

    def __init__(self, peer: str) -> None:
        super().__init__(
            peer,
            "it closed the connection when it had checked this device's key; if it does so again, "
            "this device has been expelled, as `edge cluster show` says there: take it in anew, "
            "`edge pair`",
        )


class ProtocolError(TransportError):
    """Something that the protocol does not allow: malformed bytes, a size over a limit, a wrong
    size."""


class VersionMismatchError(ProtocolError):
    """The other side speaks another version of the protocol; both sides are told."""

    def __init__(self, peer: str, *, ours: int, theirs: int) -> None:
        older = "the other device" if theirs < ours else "this device"
        super().__init__(
            f"{peer} speaks protocol version {theirs}, this device speaks version {ours}: "
            f"update Edge on {older}"
        )
        self.peer = peer
        self.ours = ours
        self.theirs = theirs


class RefusedError(TransportError):
    """One of the two sides is not of the other's cluster. The message says what to do."""


class UnknownHereError(RefusedError):
    """The other side does not know our key: it belongs to another cluster, or to ours earlier or
    later."""


class OutdatedError(RefusedError):
    """We had an earlier key of the cluster, and have got the current one."""


class AddressError(TransportError):
    """An address that cannot be used. The message names address, cause and remedy."""
