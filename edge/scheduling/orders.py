"""Orders: what the peers of a plan are told to do next. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from edge.protocol.step import Step
from edge.scheduling.prefixes import Spans
from edge.scheduling.saved_states import Save


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A prompt whose prefix the peers look up in their caches."""

    prompt: tuple[int, ...]
    salt: str = ""
    """Only caches of this salt are found."""
    source: str | None = None
    """The request whose cache begins with the first `tokens` tokens; None: none in memory."""
    tokens: int = 0
    """Without a source: where states are restored that every shard has stored; 0: see
    `PrefixFound.points`."""
    moves: bool = False
    """The cache belongs to this request from now on."""
    singly: Spans = ()
    """Spans of these tokens that were computed one at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptCache:
    """The part of a finished request's cache that stays in memory."""

    tokens: int
    """Number of its first tokens."""
    answer: tuple[int, ...]
    """Those of them that belong to the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPrefix:
    """The part of a prompt that was found in a cache and is not computed."""

    tokens: int
    singly: Spans
    """Spans of these tokens that were computed one at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What is to be done now, in the order of the fields: each may need the room of those before.

    A request that is to be swapped out, reserved or matched has no part in a step until scheduling
    is told the outcome.
    """

    refuse: Mapping[str, str] = field(default_factory=dict)
    """Submitted requests that can never start, and why. No peer knows them."""
    found: Mapping[str, FoundPrefix] = field(default_factory=dict)
    """Results of prefix matches, for the callers of these requests."""
    yields: bool = False
    """A run is under way while other requests could be served: it ends after its current token."""
    save: tuple[Save, ...] = ()
    """States to save once all earlier steps are computed."""
    finish: tuple[str, ...] = ()
    """Requests that are over, cancelled ones included: every shard frees them."""
    keep: Mapping[str, KeptCache] = field(default_factory=dict)
    """Caches of finished requests that stay in memory, until `drop` or a match that moves them."""
    drop: tuple[str, ...] = ()
    """Kept caches that are freed: prefix cache eviction."""
    give_up: Mapping[str, str] = field(default_factory=dict)
    """Requests that end because no device has room for them, and why."""
    swap_out: tuple[str, ...] = ()
    """Requests whose caches every shard moves to disk. A later step brings them back by itself."""
    reserve: Mapping[str, int] = field(default_factory=dict)
    """Requests for which every shard's disk must have room, and for how many tokens."""
    match: Mapping[str, Match] = field(default_factory=dict)
    """Prompts to look up in the caches of the peers before they are computed."""
    restore: Mapping[str, int] = field(default_factory=dict)
    """Requests whose answers are restored from copies, and up to how many tokens. The copies of
    the prompt are restored as well, unless its steps were sent before."""
    step: Step | None = None
    """None while every request waits for an outcome."""
    step_tokens: int = 0
    """Tokens that one token step of `step` gives: entries that want a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """How much the peers were given to compute since the model was loaded.

    It shows what prefix caches and cancelled requests save.
    """

    prompt_tokens: int = 0
    """Tokens of prompts in steps that were sent; tokens found in prefix caches do not count."""
    answer_tokens: int = 0
    """Tokens of answers in steps that have ended, those of cancelled requests included."""
    steps: int = 0
    """Steps that were sent, and steps by which runs went on."""
    drafted_tokens: int = 0
    """Tokens of drafts that steps verified."""
    accepted_tokens: int = 0
    """Tokens of drafts that were right."""
    draft_steps: int = 0
    """Steps that verified a draft."""

    def __add__(self, other: Work) -> Work:
        return Work(
            drafted_tokens=self.drafted_tokens + other.drafted_tokens,
            accepted_tokens=self.accepted_tokens + other.accepted_tokens,
            draft_steps=self.draft_steps + other.draft_steps,
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            answer_tokens=self.answer_tokens + other.answer_tokens,
            steps=self.steps + other.steps,
        )
