"""Events that scheduling is told of. Pure.

What a peer says is checked against what it was asked before it becomes an event (`edge/runs/`), so
scheduling trusts its events.
"""

from __future__ import annotations

from dataclasses import dataclass

from edge.protocol.step import FinishReason, Guesses, Rows, Speculation
from edge.scheduling.fairness import ANYBODY, Who
from edge.scheduling.prefixes import Spans
from edge.scheduling.prompt_pictures import PromptPictures


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """A new request, or one that an earlier plan has not finished."""

    request: str
    prompt: tuple[int, ...]
    new_tokens: int
    """Tokens that are still to be chosen; 0: `rows` are wanted."""
    answer: tuple[int, ...] = ()
    """Tokens of the answer that an earlier plan has chosen."""
    restored: int = 0
    """Number of them whose keys and values are restored from copies, not computed."""
    restores_prompt: bool = False
    """Whether those of the prompt are restored as well."""
    singly: Spans = ()
    """Spans of the prompt that the earlier plan has computed one token at a time."""
    is_led: bool = False
    """Each step is told which tokens may come next, so the request takes no part in runs."""
    who: Who = ANYBODY
    salt: str = ""
    """The request finds, and leaves, prefix caches of this salt alone."""
    rows: Rows = "logits"
    speculate: Speculation = "off"
    together: Spans = ()
    """Spans of the answer that the earlier plan has computed several tokens at a time."""
    pairs: bool = False
    """The row of its newest token is to be in a step of an even number of rows."""
    pictures: PromptPictures | None = None
    """Where the prompt's pictures are, if that matters to steps."""

    @property
    def is_repeated(self) -> bool:
        """An earlier plan has computed a part of it."""
        return bool(self.answer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Guessed:
    """Guesses at the next tokens of a request with `is_led`, which follow from its tokens so far.
    An unknown request is ignored."""

    request: str
    tokens: tuple[int, ...]
    was_guessed: bool
    """Its newest token is one of the guesses before."""


@dataclass(frozen=True, slots=True)
class Cancelled:
    """A request is given up. An unknown one is ignored."""

    request: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """The oldest step under way gave one token for each entry that wants one, or its rows; or, if
    it verified a draft, one or more tokens for its only entry."""

    tokens: tuple[int, ...] = ()
    ends: tuple[FinishReason | None, ...] = ()
    """Why the request of each token ends with it; None: it goes on."""
    last: bool = True
    """False: the step is a run that goes on."""
    at_s: float | None = None
    """When the tokens were chosen, by a clock of the peers; None: unknown."""
    drafted: int = 0
    """Tokens of the draft that was verified."""
    together: bool = False
    """The step had rows of several tokens of the answer."""
    pairs: bool = False
    """The row of the newest token is to be in a step of an even number of rows."""
    guesses: tuple[Guesses, ...] = ()
    """For each entry of a step that is over, unless there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixFound:
    """Every shard has the keys and values of the first `tokens` tokens of a prompt."""

    request: str
    tokens: int
    points: tuple[int, ...] = ()
    """If layers have states: numbers of tokens at which every shard can restore them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixMoved:
    """Devices have got what they lacked of a prefix, which is looked up again."""

    request: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskReserved:
    """Every shard has reserved disk for a request; or one could not, and `why_not` says why."""

    request: str
    why_not: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapOutDone:
    """Every shard has moved a request's cache to disk; or one could not, and the cache stays."""

    request: str
    why_not: str | None = None


Event = (
    Submitted
    | Guessed
    | Cancelled
    | Answered
    | PrefixFound
    | PrefixMoved
    | DiskReserved
    | SwapOutDone
)
