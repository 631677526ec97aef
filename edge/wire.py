"""What coordinator and peers say to each other: frame kinds, and the one large message.

A session is one shard of one loaded model for one coordinator. Its frames, in the order of use:

    describe             → who the peer is, what it has, what it runs
    offer   (manifest)   → which pieces of a shard's weights the peer lacks
    piece   (bytes)      → stored
    seal                 → the shard is complete on the peer's disk
    open    (assignment) → memory is reserved, the shard is loaded
    connect (places)     → links to the other shards are up
    begin, step, finish  → no answer; the last stage reports every step, in order, by `token`,
                           `logits` or `done`; any stage may report `failed`
    close                → everything of the session is freed

Both sides send `alive` every few seconds (see heartbeat.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edge.backends.base import Step
from edge.errors import (
    CapacityError,
    CheckpointError,
    EdgeError,
    PeerError,
    PeerLostError,
    PlanError,
    ProtocolError,
    RequestError,
)
from edge.formats import WeightFormat, weight_format
from edge.models.spec import ModelSpec
from partition import Plan

MAX_CHUNK_TOKENS = 4096

_LONGEST_MESSAGE = 4000
_MAX_SEATS = 4096

_ERROR_KINDS: dict[str, type[EdgeError]] = {
    "request": RequestError,
    "capacity": CapacityError,
    "plan": PlanError,
    "checkpoint": CheckpointError,
    "protocol": ProtocolError,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What one peer needs to know to run its shard."""

    session: str
    model: ModelSpec
    plan: Plan
    stage: int
    rank: int
    weight_format: WeightFormat
    manifest_digest: str
    context_tokens: int
    chunk_tokens: int

    def to_payload(self) -> bytes:
        return json.dumps(
            {
                "session": self.session,
                "model": self.model.to_json(),
                "plan": self.plan.to_json(),
                "stage": self.stage,
                "rank": self.rank,
                "dtype": self.weight_format.name,
                "block_size": self.weight_format.block_size,
                "manifest": self.manifest_digest,
                "context_tokens": self.context_tokens,
                "chunk_tokens": self.chunk_tokens,
            }
        ).encode()

    @classmethod
    def from_payload(cls, payload: bytes | bytearray | memoryview) -> Assignment:
        """Raises ProtocolError for anything `to_payload` could not have written."""
        try:
            value = json.loads(bytes(payload))
            this = cls(
                session=text(value, "session"),
                model=ModelSpec.from_json(value["model"]),
                plan=Plan.from_json(value["plan"]),
                stage=integer(value, "stage"),
                rank=integer(value, "rank"),
                weight_format=weight_format(text(value, "dtype"), integer(value, "block_size")),
                manifest_digest=text(value, "manifest"),
                context_tokens=integer(value, "context_tokens"),
                chunk_tokens=integer(value, "chunk_tokens"),
            )
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ProtocolError(f"a malformed assignment: {error}") from error
        if this.stage >= len(this.plan.stages):
            raise ProtocolError(f"an assignment for stage {this.stage}, which the plan has not")
        if this.rank >= len(this.plan.stages[this.stage].shards):
            raise ProtocolError(f"an assignment for rank {this.rank}, which the stage has not")
        if not 0 < this.context_tokens <= this.model.context_tokens:
            raise ProtocolError(
                f"a context of {this.context_tokens} tokens; the model has "
                f"{this.model.context_tokens}"
            )
        if not 0 < this.chunk_tokens <= MAX_CHUNK_TOKENS:
            raise ProtocolError(f"chunks of {this.chunk_tokens} tokens; 1 to {MAX_CHUNK_TOKENS}")
        return this


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one shard of a plan runs, as its neighbours need to know it."""

    name: str
    """The device's, for messages."""
    addresses: tuple[str, ...]
    """Tried in this order."""


def places_to_payload(places: Mapping[tuple[int, int], Place]) -> bytes:
    """{(stage, rank): place} for a `connect`."""
    return json.dumps(
        [
            {"stage": stage, "rank": rank, "name": place.name, "addresses": place.addresses}
            for (stage, rank), place in places.items()
        ]
    ).encode()


def places_from_payload(
    payload: bytes | bytearray | memoryview,
) -> dict[tuple[int, int], Place]:
    """Raises ProtocolError for anything `places_to_payload` could not have written."""
    try:
        entries = json.loads(bytes(payload))
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a malformed list of places: {error}") from error
    if not isinstance(entries, list) or len(entries) > _MAX_SEATS:
        raise ProtocolError(f"places must be a list of at most {_MAX_SEATS}")
    places: dict[tuple[int, int], Place] = {}
    for entry in entries:
        if not isinstance(entry, dict):
            raise ProtocolError("a place must be an object")
        addresses = entry.get("addresses")
        if not isinstance(addresses, list) or not 0 < len(addresses) <= 64:
            raise ProtocolError("a place needs 1 to 64 addresses")
        places[(integer(entry, "stage"), integer(entry, "rank"))] = Place(
            name=text(entry, "name"),
            addresses=tuple(text({"address": each}, "address") for each in addresses),
        )
    return places


def step_to_header(step: Step) -> dict[str, Any]:
    return {
        "request": step.request,
        "position": step.position,
        "tokens": list(step.tokens),
        "logit_rows": step.logit_rows,
    }


def step_from_header(header: Mapping[str, Any]) -> Step:
    """Raises ProtocolError for a malformed step."""
    tokens = header.get("tokens")
    if not isinstance(tokens, list) or not 0 < len(tokens) <= MAX_CHUNK_TOKENS:
        raise ProtocolError("a step needs 1 to 4096 tokens")
    if any(type(token) is not int for token in tokens):
        raise ProtocolError("a step's tokens must be integers")
    return Step(
        request=text(header, "request"),
        position=integer(header, "position"),
        tokens=tuple(tokens),
        logit_rows=integer(header, "logit_rows"),
    )


def text(value: Mapping[str, Any], name: str) -> str:
    found = value.get(name)
    if not isinstance(found, str) or not 0 < len(found) <= 1024:
        raise ProtocolError(f"{name} must be a short text, not {found!r}")
    return found


def integer(value: Mapping[str, Any], name: str) -> int:
    found = value.get(name)
    if type(found) is not int or not 0 <= found < 1 << 53:
        raise ProtocolError(f"{name} must be a whole number, not {found!r}")
    return found


def printable(value: object, *, limit: int = 200) -> str:
    """What another device says, made safe for a terminal: one line, no control characters."""
    letters = str(value)[:limit]
    return "".join(letter if letter.isprintable() else " " for letter in letters).strip() or "?"


def error_to_header(error: BaseException) -> dict[str, Any]:
    """An error as the other side will raise it again."""
    if isinstance(error, PeerLostError):
        return {"error": "lost", "peer": error.peer, "message": _cut(error)}
    for kind, cls in _ERROR_KINDS.items():
        if isinstance(error, cls):
            return {"error": kind, "message": _cut(error)}
    if isinstance(error, PeerError):  # the other side puts our name before it
        return {"error": "peer", "message": _cut(error).removeprefix(f"peer {error.peer}: ")}
    if isinstance(error, EdgeError):
        return {"error": "peer", "message": _cut(error)}
    return {"error": "internal", "message": f"{type(error).__name__}: {_cut(error)}"}


def _cut(error: BaseException) -> str:
    """A frame's header has a limit, and a message may quote anything."""
    return str(error)[:_LONGEST_MESSAGE]


def error_from_header(peer: str, header: Mapping[str, Any]) -> EdgeError:
    """The error that `peer` reported, naming it."""
    message = printable(header.get("message", "no reason given"), limit=_LONGEST_MESSAGE)
    kind = header.get("error")
    if kind == "lost":
        lost = printable(header.get("peer", "?"))
        return PeerLostError(lost, message.removeprefix(f"peer {lost}: "))
    cls = _ERROR_KINDS.get(str(kind))
    if cls is not None:
        return cls(f"peer {peer}: {message}")
    return PeerError(peer, message)
