"""What coordinator and peers say to each other: frame kinds, and the one large message.

A session is one shard of one loaded model for one coordinator. Its frames, in the order of use:

    describe             → who the peer is, what it has, what it runs
    memory_rate          → bytes per second it reads from memory, measured now
    profile, profile_together, probe → how fast it and its links are: see measurements.py
    offer   (manifest)   → which pieces of a shard's weights the peer lacks
    piece   (bytes)      → stored
    seal                 → the shard is complete on the peer's disk
    open    (assignment) → memory is reserved, the shard is loaded
    connect (places)     → links to the other shards are up
    begin, step, yield, finish  → no answer; the sampler reports `tokens` or `logits` for each step,
                           and any shard may report `failed`
    suspend              → keys and values of a request go to disk; every shard reports `suspended`
    reserve              → so many of its tokens have room there; every shard reports `reserved`
    recall (prompt)      → those of its beginning are looked for; every shard reports `recalled`
    measure              → where its time went, and its memory
    memory               → it stays under another budget; describes itself as it is then
    close                → everything of the session is freed

Both sides send `alive` every few seconds (see heartbeat.py).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

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
from edge.models.spec import ModelSpec
from edge.protocol.step import Step, StepEntry, StepLimits
from edge.protocol.wire_rules import WireRules
from edge.weights.formats import KvDtype, WeightFormat, kv_dtype, weight_format
from edge.weights.layout import ShardLayout, shard_layout
from kernels.sampling.parameters import SamplingParameters
from partition import Plan
from partition import PlanError as PartitionPlanError

MAX_CHUNK_TOKENS = 4096
MAX_REQUESTS = 1024

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
    limits: StepLimits
    kv_dtype: KvDtype
    weights_digest: str
    """Of the whole model's weights: those of other shards decide what this one computes."""
    wire_rules: WireRules
    """The same for every shard of the plan, so both ends of a link agree."""

    @property
    def layout(self) -> ShardLayout:
        return shard_layout(self.model, self.plan, stage=self.stage, rank=self.rank)

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
                "accuracy": self.weight_format.accuracy,
                "manifest": self.manifest_digest,
                "weights": self.weights_digest,
                "limits": dataclasses.asdict(self.limits),
                "kv_dtype": self.kv_dtype,
                "wire": self.wire_rules.to_json(),
            }
        ).encode()

    @classmethod
    def from_payload(cls, payload: bytes | bytearray | memoryview) -> Assignment:
        """Raises ProtocolError for anything `to_payload` could not have written."""
        try:
            value = json.loads(bytes(payload))
            plan = Plan.from_json(value["plan"])
            this = cls(
                session=text(value, "session"),
                model=ModelSpec.from_json(value["model"]),
                plan=plan,
                stage=integer(value, "stage"),
                rank=integer(value, "rank"),
                weight_format=weight_format(
                    text(value, "dtype"), integer(value, "block_size"), text(value, "accuracy")
                ),
                manifest_digest=text(value, "manifest"),
                weights_digest=text(value, "weights"),
                limits=StepLimits(
                    **{
                        limit.name: integer(value["limits"], limit.name)
                        for limit in dataclasses.fields(StepLimits)
                    }
                ),
                kv_dtype=kv_dtype(text(value, "kv_dtype")),
                wire_rules=WireRules.from_json(value["wire"], num_stages=len(plan.stages)),
            )
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise ProtocolError(f"a malformed assignment: {error}") from error
        except PartitionPlanError as error:
            raise ProtocolError(f"an assignment with a malformed plan: {error}") from error
        if this.stage >= len(this.plan.stages):
            raise ProtocolError(f"an assignment for stage {this.stage}, which the plan has not")
        if this.rank >= len(this.plan.stages[this.stage].shards):
            raise ProtocolError(f"an assignment for rank {this.rank}, which the stage has not")
        limits = this.limits
        if not 0 < limits.context_tokens <= this.model.context_tokens:
            raise ProtocolError(
                f"a context of {limits.context_tokens} tokens; the model has "
                f"{this.model.context_tokens}"
            )
        if not 0 < limits.chunk_tokens <= MAX_CHUNK_TOKENS:
            raise ProtocolError(f"chunks of {limits.chunk_tokens} tokens; 1 to {MAX_CHUNK_TOKENS}")
        if not 0 < limits.requests <= MAX_REQUESTS:
            raise ProtocolError(f"{limits.requests} requests at once; 1 to {MAX_REQUESTS}")
        if max(limits.cached_tokens, limits.disk_tokens) < limits.context_tokens:
            raise ProtocolError("room for fewer tokens than one request may have")
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingTerms:
    """What the shards of the last stage need to know of a request before its first token."""

    sampling: SamplingParameters
    end_ids: frozenset[int]
    max_new_tokens: int

    def to_header(self) -> dict[str, Any]:
        return {
            "sampling": self.sampling.to_json(),
            "end_ids": sorted(self.end_ids),
            "max_new_tokens": self.max_new_tokens,
        }

    @classmethod
    def from_header(cls, header: Mapping[str, Any]) -> SamplingTerms:
        """Raises ProtocolError for a malformed header."""
        end_ids = header.get("end_ids")
        if not isinstance(end_ids, list) or any(type(token) is not int for token in end_ids):
            raise ProtocolError("end_ids must be a list of token ids")
        try:
            sampling = SamplingParameters.from_json(header.get("sampling"))
        except ValueError as error:
            raise ProtocolError(str(error)) from error
        return cls(
            sampling=sampling,
            end_ids=frozenset(end_ids),
            max_new_tokens=integer(header, "max_new_tokens"),
        )


def prompt_to_payload(prompt: Sequence[int]) -> bytes:
    """For a `recall`."""
    return np.asarray(prompt, "<i4").tobytes()


def prompt_from_payload(
    payload: bytes | bytearray | memoryview, vocab_size: int, *, most_tokens: int
) -> tuple[int, ...]:
    """Raises ProtocolError for anything `prompt_to_payload` could not have written, or longer."""
    if len(payload) % 4:
        raise ProtocolError("a prompt is whole numbers of 4 bytes")
    if len(payload) > 4 * most_tokens:
        raise ProtocolError("a prompt that is longer than the context")
    tokens = np.frombuffer(payload, "<i4")
    if not tokens.size or tokens.min() < 0 or tokens.max() >= vocab_size:
        raise ProtocolError(f"a prompt is ids of a vocabulary of {vocab_size}, at least one")
    return tuple(tokens.tolist())


def step_to_header(step: Step) -> dict[str, Any]:
    entries = [[e.request, e.position, list(e.tokens), e.logit_rows] for e in step.entries]
    return {"entries": entries, "run": step.run}


def step_from_header(header: Mapping[str, Any]) -> Step:
    """Raises ProtocolError for a malformed step."""
    entries = header.get("entries")
    if not isinstance(entries, list) or not 0 < len(entries) <= MAX_REQUESTS:
        raise ProtocolError(f"a step needs 1 to {MAX_REQUESTS} requests")
    try:
        return Step(entries=tuple(map(_read_entry, entries)), run=integer(header, "run"))
    except ValueError as error:
        raise ProtocolError(str(error)) from error


def _read_entry(value: object) -> StepEntry:
    if not isinstance(value, list) or len(value) != 4:
        raise ProtocolError("a step's entry is request, position, tokens and logit rows")
    named = dict(zip(("request", "position", "tokens", "logit_rows"), value, strict=True))
    tokens = named["tokens"]
    if not isinstance(tokens, list) or not 0 < len(tokens) <= MAX_CHUNK_TOKENS:
        raise ProtocolError(f"an entry needs 1 to {MAX_CHUNK_TOKENS} tokens")
    if any(type(token) is not int for token in tokens):
        raise ProtocolError("tokens must be whole numbers")
    return StepEntry(
        request=text(named, "request"),
        position=integer(named, "position"),
        tokens=tuple(tokens),
        logit_rows=integer(named, "logit_rows"),
    )


def text(value: Any, name: str) -> str:
    """A field of an object from outside. Raises ProtocolError."""
    found = value.get(name) if isinstance(value, Mapping) else None
    if not isinstance(found, str) or not 0 < len(found) <= 1024:
        raise ProtocolError(f"{name} must be a short text, not {found!r}")
    return found


def integer(value: Any, name: str) -> int:
    """A field of an object from outside, 0 or more. Raises ProtocolError."""
    found = value.get(name) if isinstance(value, Mapping) else None
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
