"""What scheduling knows of one request. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from edge.protocol.step import Rows, Speculation, StepEntry
from edge.scheduling.fairness import Who
from edge.scheduling.prefixes import Span, Spans, cut
from edge.scheduling.prompt_pictures import PromptPictures
from edge.scheduling.resident import Resident


@dataclass(slots=True)
class RequestState:
    """What a request wants, what is computed of it, and what delays the rest."""

    request: str
    tokens: list[int]
    """Prompt and answer."""
    memory: Resident
    prompt_tokens: int
    """The tokens after them are answer, also those that an earlier plan has computed."""
    rows: Rows | None
    """What is wanted of its rows; None: tokens are wanted."""
    is_led: bool
    """Its next token must be allowed by a grammar: it has no part in runs."""
    who: Who
    salt: str = ""
    """It shares prefixes only with requests of this salt."""
    restored: int = 0
    """Tokens of the answer that are restored from copies once the prompt is computed; or"""
    restores_prompt: bool = False
    """The prompt is restored from copies as well."""
    computed: int = 0
    """Tokens in steps that were handed out."""
    singly: Spans = ()
    """Spans of the prompt that were, or are to be, computed one token at a time."""
    speculate: Speculation = "off"
    together: Spans = ()
    """Spans of the answer that were, or are to be, computed in steps of an even number of rows:
    tokens and guesses. The rest of it is computed one token at a time."""
    behind: int = 0
    """Computed tokens that the next step computes again, because its states are those before them:
    they were in steps of which a guess was wrong."""
    pairs: bool = False
    """The sampler said of its newest token: its row is in a step of an even number of rows."""
    guesses: tuple[int, ...] = ()
    """Tokens that probably follow."""
    in_turn: int = 0
    """The most requests with guesses that are faster in turn than in one step."""
    turn: int = 0
    """The number of its newest step that had a turn of its own."""
    was_guessed: bool = False
    """Its newest token was one of them."""
    is_repeated: bool = False
    """An earlier plan has computed it before, in those steps."""
    saves: set[int] = field(default_factory=set)
    """Lengths of the prompt behind which a state is saved."""
    asked: int = 0
    """Tokens of its prefix that peers were told to take from another request, or to restore."""
    point: int = 0
    """Tokens at which every shard can restore states; 0: not known."""
    state: Literal["coming", "matching", "going"] = "coming"
    """It is in steps only while "going": before, the start of its computation is not settled."""
    awaited: str = ""
    """The request that will have `awaited_tokens` of its prefix."""
    awaited_tokens: int = 0
    pictures: PromptPictures | None = None
    """Where the prompt's pictures are, if that matters; None: it has none, or it does not."""
    prompt: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        self.prompt = np.asarray(self.tokens[: self.prompt_tokens], np.int64)

    def part(self, first: int, tokens: tuple[int, ...], *, logit_rows: int) -> StepEntry:
        """Its entry of a step, with these tokens from position `first` on."""
        entry = StepEntry(
            request=self.request, position=first, tokens=tokens, logit_rows=logit_rows
        )
        return entry if self.pictures is None else self.pictures.placed(entry)

    def block_at(self, start: int) -> Span | None:
        """The next rows that see each other, at token `start` or behind it; None: there are
        none."""
        blocks = () if self.pictures is None else self.pictures.blocks
        return next((each for each in blocks if each[1] > start), None)

    def before_block(self, tokens: int) -> int:
        """So many tokens of the prompt, or those before the rows that are among them in part."""
        block = self.block_at(tokens)
        return tokens if block is None else min(tokens, block[0])

    @property
    def is_decoding(self) -> bool:
        """Only one sampled token is left to compute."""
        return self.prompt_tokens <= self.computed == len(self.tokens) - 1

    @property
    def is_paired(self) -> bool:
        """Whether its next token is computed in a step of an even number of rows.

        With `is_led`: beside guesses, and where the token was one, so that it does not matter how
        many are verified at once. Pairs everywhere would slow free texts down, where no more tokens
        are guessed. Else as the sampler said, or all of its tokens are.
        """
        if self.is_led:
            return bool(self.guesses) or self.was_guessed
        return self.speculate not in {"off", "auto"} or self.pairs

    @property
    def answered_singly(self) -> Spans:
        """Spans of the computed part of the answer that were computed one token at a time."""
        bounds = [bound for span in self.together for bound in span]
        bounds = [self.prompt_tokens, *bounds, max(self.prompt_tokens, self.computed)]
        pairs = zip(bounds[::2], bounds[1::2], strict=True)
        return tuple((first, last) for first, last in pairs if first < last)

    def may_have(self, singly: Spans, tokens: int) -> bool:
        """Whether it may use another request's first `tokens` tokens, of which `singly` were
        computed one at a time."""
        return not self.is_repeated or cut(singly, tokens) == cut(self.singly, tokens)

    @property
    def will_go_on(self) -> bool:
        """Whether more of its prompt will be computed, independent of other requests."""
        is_inside = self.memory.place == "memory"
        return is_inside and self.rows is None and self.computed < self.prompt_tokens

    @property
    def to_repeat(self) -> int:
        """Tokens of the answer that an earlier plan has computed and this one has not yet."""
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
        """Its next token can be computed now."""
        return self.is_decoding and self.memory.can_step and not self.memory.steps_out
