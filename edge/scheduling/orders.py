"""What the scheduler has the peers do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from edge.protocol.step import Step
from edge.scheduling.prefixes import Spans
from edge.scheduling.saved_states import Save


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A prompt, of whose beginning peers may have keys and values."""

    prompt: tuple[int, ...]
    salt: str = ""
    """Only what was left with the same one is found."""
    source: str | None = None
    """Whose cache begins with the first `tokens` of them; None: none in memory."""
    tokens: int = 0
    moves: bool = False
    """The cache is this request's from now on."""
    singly: Spans = ()
    """Those of these tokens that were computed one at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What stays in memory of a request that is over."""

    tokens: int
    """The first ones."""
    answer: tuple[int, ...]
    """Those of them that follow its prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What is to be done now, in the order of the fields: each may need the room of those before.

    No step has a part of a request that is to be swapped out, to reserve or to be matched, until
    the scheduler is told what became of it.
    """

    yields: bool = False
    """A run is under way while others could be served: it ends after its current token."""
    save: tuple[Save, ...] = ()
    """States as they are once all that was handed out before is computed."""
    finish: tuple[str, ...] = ()
    """Requests that are over, those given up among them: every shard frees them."""
    keep: Mapping[str, Kept] = field(default_factory=dict)
    """What stays in memory of requests that are over, until `drop`, or a match that moves it."""
    drop: tuple[str, ...] = ()
    """What was kept of these is freed."""
    give_up: Mapping[str, str] = field(default_factory=dict)
    """Requests that end because there is room for them nowhere; why, for their callers."""
    swap_out: tuple[str, ...] = ()
    """Requests whose caches every shard moves to disk. Steps bring them back by themselves."""
    reserve: Mapping[str, int] = field(default_factory=dict)
    """Tokens of requests for which every shard's disk must have room."""
    match: Mapping[str, Match] = field(default_factory=dict)
    """Prompts whose beginnings the peers may have; asked before any of one is computed."""
    restore: Mapping[str, int] = field(default_factory=dict)
    """Tokens of these requests' answers whose keys and values every shard is given, as it is those
    of the prompt, unless that was handed out before."""
    step: Step | None = None
    """None while everything waits for an answer."""
