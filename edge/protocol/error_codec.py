"""Errors from a peer to its coordinator, which raises them with the peer's name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from edge import offload
from edge.errors import (
    CapacityError,
    CheckpointError,
    DeviceLostError,
    EdgeError,
    PeerError,
    PeerLostError,
    PlanError,
    ProtocolError,
    RequestError,
)
from edge.protocol.fields import Printable, ReadBy, one_line
from edge.protocol.frame_codec import Event

_LONGEST_MESSAGE = 4000
_LONGEST_REMEDY = 1000

_KINDS: dict[str, type[EdgeError]] = {
    "request": RequestError,
    "capacity": CapacityError,
    "plan": PlanError,
    "checkpoint": CheckpointError,
    "protocol": ProtocolError,
}

_Message = Annotated[str, ReadBy(lambda value: one_line(value, limit=_LONGEST_MESSAGE))]
_Remedy = Annotated[str, ReadBy(lambda value: one_line(value, limit=_LONGEST_REMEDY))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed(Event):
    """A call, a post or a step could not be carried out, and why."""

    kind = "failed"
    error: Printable
    """The error's kind."""
    message: _Message
    remedy: _Remedy | None = None
    """What to do about it; the message may already say so."""
    peer: Printable | None = None
    """The lost device; None: the sender's own."""

    @classmethod
    def of(cls, error: BaseException) -> Failed:
        """The frame from which the other side raises the same error."""
        message = str(error)[:_LONGEST_MESSAGE]  # a header has a limit, and the message may quote
        # long text
        if not isinstance(error, EdgeError):
            return cls(error="internal", message=f"{type(error).__name__}: {message}")
        remedy = error.remedy[:_LONGEST_REMEDY] or None
        if isinstance(error, PeerLostError):
            return cls(error="lost", message=message, remedy=remedy, peer=error.peer)
        if isinstance(error, DeviceLostError):
            return cls(error="lost", message=message, remedy=remedy)
        for kind, known in _KINDS.items():
            if isinstance(error, known):
                return cls(error=kind, message=message, remedy=remedy)
        if isinstance(error, PeerError):  # the other side adds our name again
            message = message.removeprefix(f"peer {error.peer}: ")
        return cls(error="peer", message=message, remedy=remedy)

    def as_error(self, peer: str) -> EdgeError:
        """The error that `peer` reported, with the peer's name."""
        if self.error == "lost":
            lost = self.peer or peer
            message = self.message.removeprefix(f"peer {lost}: ")
            return PeerLostError(lost, message, remedy=self.remedy)
        known = _KINDS.get(self.error)
        if known is not None:
            return known(f"peer {peer}: {self.message}", remedy=self.remedy)
        return PeerError(peer, self.message, remedy=self.remedy)


def map_store_error(error: Exception) -> Exception:
    """The EdgeError for an error of the store, which a coordinator can raise by its kind.

    A full disk becomes a CapacityError, damaged bytes a CheckpointError.
    """
    if isinstance(error, offload.StoreFullError):
        return CapacityError(str(error))
    if isinstance(error, offload.StoreCorruptError):
        return CheckpointError(f"{error}", remedy="load the model again: undamaged pieces are kept")
    return EdgeError(str(error)) if isinstance(error, offload.StoreError) else error
