"""A request, as the scheduler sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from edge.protocol.step import Rows
from edge.scheduling.fairness import Who
from edge.scheduling.prefixes import Spans, cut
from edge.scheduling.residency import Member


@dataclass(slots=True)
class ScheduledRequest:
    """What is wanted of it, what of that is computed, and what hinders more."""

    request: str
    tokens: list[int]
    memory: Member
    prompt_tokens: int
    """The tokens after them are answer, also those that another plan has computed."""
    rows: Rows | None
    """What is wanted of its rows; None: tokens are wanted."""
    is_led: bool
    """What its next token may be depends on the last one: it has no part in runs."""
    who: Who
    """Who asked."""
    salt: str = ""
    """Only another with the same one has its beginning."""
    restored: int = 0
    """Tokens of the answer that are given, once the prompt is computed; or"""
    restores_prompt: bool = False
    """with it."""
    computed: int = 0
    singly: Spans = ()
    """Those of the prompt's tokens that were computed one at a time, or are to be."""
    is_repeated: bool = False
    """Another plan has computed it before, in those steps."""
    saves: set[int] = field(default_factory=set)
    """Numbers of the prompt's tokens behind which a state is to be saved."""
    asked: int = 0
    """Tokens of its beginning that peers were told to take from another."""
    state: Literal["coming", "matching", "going"] = "coming"
    """No step has a part of it before it goes: where it begins is not settled."""
    awaited: str = ""
    """The request that will have `awaited_tokens` of its beginning."""
    awaited_tokens: int = 0
    prompt: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        self.prompt = np.asarray(self.tokens[: self.prompt_tokens], np.int64)

    @property
    def is_decoding(self) -> bool:
        """One sampled token is all that is left to compute."""
        return self.prompt_tokens <= self.computed == len(self.tokens) - 1

    def may_have(self, singly: Spans, tokens: int) -> bool:
        """Whether its first N tokens may be another's, who computed some of them one at a time."""
        return not self.is_repeated or cut(singly, tokens) == cut(self.singly, tokens)

    @property
    def will_go_on(self) -> bool:
        """More of its prompt will be computed, whatever others do."""
        is_inside = self.memory.place == "memory"
        return is_inside and self.rows is None and self.computed < self.prompt_tokens

    @property
    def to_repeat(self) -> int:
        """Tokens of the answer that another plan has computed, and this one has yet to."""
        if self.state != "going" or self.computed < self.prompt_tokens:
            return 0
        return max(0, len(self.tokens) - 1 - self.computed)

    @property
    def is_answering(self) -> bool:
        """Its prompt is handed out, and more than one token of its answer is to come."""
        has_begun = self.computed >= self.prompt_tokens and not self.to_repeat
        goes_on = self.memory.length + 1 < self.memory.longest
        return has_begun and goes_on and self.memory.place == "memory"

    @property
    def is_ready(self) -> bool:
        """Nothing hinders its next token."""
        return self.is_decoding and self.memory.can_step and not self.memory.steps_out
