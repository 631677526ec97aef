"""The state of scheduling for one run of a plan. Pure: no peers, text or time.

Only `decide` changes it. It is mutable, as every token changes its request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from edge.offload.kv.slot_order import SlotOrder
from edge.protocol.step import MAX_CHUNK_TOKENS, SHORTEST_STEP, Rows, Step
from edge.scheduling.fairness import FairShares
from edge.scheduling.orders import FoundPrefix, Work
from edge.scheduling.pacing import MixedPacing, Pacing
from edge.scheduling.prefix_reuse import PrefixReuse
from edge.scheduling.prefixes import PrefixCacheIndex
from edge.scheduling.request_state import RequestState
from edge.scheduling.residency import Residency
from edge.scheduling.saved_states import SavedStates


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingLimits:
    """Facts of a run that scheduling follows."""

    stages: int
    """Stages of the plan; as many decode steps are under way at once."""
    chunk_tokens: int
    """Most tokens of a prompt in one step."""
    logit_chunk_tokens: int
    """Most tokens in a step that reports all logits."""
    state_chunk_tokens: int = MAX_CHUNK_TOKENS
    """Most tokens in a step that reports hidden states."""
    rows_agree: bool = False
    """A row is the same in every step of an even number of tokens, so a prompt may be cut behind
    any two tokens."""
    batches_agree: bool = False
    """A token is the same whichever other requests are in its step, so several answers may be
    repeated together."""
    mixes: bool = False
    """A step may have a chunk of a prompt beside tokens of other requests, each with the bits of a
    step of its own."""
    drafts: int = 0
    """The longest draft of an answer; 0: no drafts."""
    rewinds: bool = False
    """Requests have states; see `Step.drafting`."""
    cut_end: Callable[[int], int] | None = None
    """The most tokens that a request may have so that it can be cut at any position after a given
    one; None: any number."""
    memory_tokens: int = 0
    """Tokens of all requests that fit in memory. A longer request has no drafts."""

    def most_in_chunk(self, rows: Rows | None) -> int:
        """Most tokens in one chunk of a prompt of which these rows are wanted."""
        if rows == "logits":
            return min(self.chunk_tokens, self.logit_chunk_tokens)
        return min(self.chunk_tokens, self.state_chunk_tokens if rows == "states" else 1 << 60)


@dataclass(slots=True)
class StepUnderWay:
    """A step that was handed out and not answered yet."""

    step: Step
    tokens: int
    """How many tokens it gives."""
    answers: int = 0
    """Answers so far, one for each step of its run."""
    since_s: float | None = None
    """When the answer came that it was handed out after; None: it was not handed out at once."""


@dataclass(slots=True, eq=False)
class SchedulingState:
    """All requests of one run, and the steps under way. Made by `new`."""

    limits: SchedulingLimits
    residency: Residency
    reuse: PrefixReuse | None
    """None: nothing is kept, and no request goes on from another."""
    active: dict[str, RequestState]
    """Requests that are not over."""
    pacing: Pacing = field(default_factory=Pacing)
    turns: deque[str] = field(default_factory=deque)
    """Requests with prompt left to compute."""
    under_way: deque[StepUnderWay] = field(default_factory=deque)
    slots: SlotOrder = field(default_factory=SlotOrder)
    """Where caches lie in a shard's pool after the orders so far. It does not affect results; it
    orders batches so that fewer caches are copied."""
    decoded_last: bool = False
    mixed_last: bool = False
    """The newest step has a chunk and tokens of answers."""
    mixed_pacing: MixedPacing = field(default_factory=MixedPacing)
    last_answer_s: float | None = None
    """When the last answer came to a step that the next one waited for."""
    newest_answer_s: float | None = None
    """When the newest answer came, while it is decided what follows it."""
    disk_full: str = ""
    """Why a shard could not swap out, if one could not."""
    work: Work = field(default_factory=Work)
    come: list[str] = field(default_factory=list)
    """Requests that are new in memory, and whose prefix was not looked up yet."""
    finished: list[str] = field(default_factory=list)
    """To be told with the next orders, like the next three."""
    refused: dict[str, str] = field(default_factory=dict)
    given_up: dict[str, str] = field(default_factory=dict)
    found: dict[str, FoundPrefix] = field(default_factory=dict)

    @classmethod
    def new(
        cls,
        limits: SchedulingLimits,
        residency: Residency,
        prefixes: PrefixCacheIndex | None = None,
        saved: SavedStates | None = None,
    ) -> SchedulingState:
        """prefixes: the prefix cache; None: there is none. saved: where layers have states."""
        active: dict[str, RequestState] = {}
        reuse = None
        if prefixes is not None:
            if limits.rows_agree:
                prefixes.unit_tokens = SHORTEST_STEP
            reuse = PrefixReuse(
                active,
                residency,
                prefixes,
                saved,
                chunk_tokens=limits.chunk_tokens,
            )
        return cls(limits, residency, reuse, active)

    @property
    def shares(self) -> FairShares:
        return self.residency.shares

    @property
    def repeats(self) -> list[RequestState]:
        """Requests with parts of an answer that an earlier plan has computed before."""
        return [each for each in self.active.values() if each.to_repeat and each.memory.can_step]

    @property
    def should_yield(self) -> bool:
        """The run under way keeps other requests waiting."""
        return bool(
            self.under_way
            and not self.under_way[-1].step.ends_at_once
            and (self.turns or self.repeats or self.residency.awaits_room)
        )

    @property
    def at_once(self) -> int:
        """Answers with drafts whose steps are computed at the same time: one in each stage. Of
        those with states, every stage hears how a step ended before it begins another."""
        return 1 if self.limits.rewinds else self.limits.stages

    @property
    def waiting_tokens(self) -> int:
        """Tokens of prompts that are not in steps yet."""
        return sum(max(0, each.prompt_tokens - each.computed) for each in self.active.values())

    def as_found_by(self, prompt: Sequence[int], salt: str, under_way: int) -> int:
        """Tokens of a prompt that need not be computed: see `PrefixReuse.beginning`."""
        return 0 if self.reuse is None else self.reuse.beginning(prompt, salt, under_way)

    def ready(self) -> Mapping[str, RequestState]:
        """Requests whose next token can be computed now."""
        return {name: each for name, each in self.active.items() if each.is_ready}
