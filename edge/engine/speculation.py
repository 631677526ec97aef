"""Speculation at the sampler: whether the next step verifies a draft, and how long it is.

A row alone is rounded in another way than a row of a step of several rows. So two things are
decided apart. Whether an answer's rows are computed in pairs follows from its tokens alone, so
that its last bits do not depend on time, on wrong guesses, or on where a run was interrupted. How
long a draft is, which changes no bit, follows from the time of steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edge.engine.drafter import Drafter
from edge.engine.further_drafter import Follower
from edge.protocol.step import Speculation

_NEWEST = 0.2
"""Weight of the newest guess in the share of right ones."""
_EXPECTED = 0.5
"""Share of right guesses that an answer begins with whose rows are always in pairs."""

_PAYS, _PAYS_WITH_EXPERTS = (0.55, 0.45), (0.8, 0.7)
"""Shares of right guesses at which "auto" begins to draft, and below which it ends. On CPUs two
rows take from 1.07 to 1.4 times as long as one; where they use different experts, up to twice. The
time of steps does not decide, because the last bits of an answer would depend on it."""

_SLOPE = 0.15
"""Time of a further row relative to the step, before steps of two numbers of rows were timed."""
_NEWEST_TIME, _MOST_SLOWER = 0.3, 2.0
"""Weight of the newest time; a slower step than this multiple of the mean is an outlier."""


class StepSeconds:
    """The time of decode steps by their rows: as measured, or by a line through the nearest two."""

    def __init__(self) -> None:
        self._known: dict[int, float] = {}
        self._begun: set[int] = set()
        """Rows of steps that were run once. The first takes longer: back ends prepare for it."""

    def note(self, rows: int, seconds: float) -> None:
        if rows not in self._begun:
            self._begun.add(rows)
            return
        before = self._known.get(rows)
        if before is not None:
            seconds = before + _NEWEST_TIME * (min(seconds, _MOST_SLOWER * before) - before)
        self._known[rows] = seconds

    def of(self, rows: int) -> float:
        """Seconds of a step of `rows` rows; in a unit of its own if no step was timed."""
        known = self._known
        if rows in known:
            return known[rows]
        below = sorted(each for each in known if each < rows)[-2:]
        above = [min(each for each in known if each > rows)] if max(known, default=0) > rows else []
        near = (below + above)[-2:]
        if not near:
            return 1 + _SLOPE * rows
        first, last = near[0], near[-1]
        slope = (
            _SLOPE * known[first]
            if first == last
            else (max(0.0, known[last] - known[first]) / (last - first))
        )
        return max(known[first] + slope * (rows - first), 0.5 * known[first])


def draft_length(right: float, seconds: StepSeconds, most: int) -> int:
    """The odd length, up to `most`, of the draft that gives the most tokens per second.

    right: chance of a guess whose predecessors are right. An odd draft makes an even step.
    """
    best, most_per_s = 1, 0.0
    expected = 1.0
    for length in range(1, most + 1):
        expected += right**length
        if length % 2:
            per_s = expected / seconds.of(1 + length)
            if per_s > most_per_s:
                best, most_per_s = length, per_s
    return best


@dataclass(slots=True)
class _Answer:
    """What is known of the guesses of one answer."""

    drafter: Drafter
    end: int
    """Its tokens so far."""
    right: float
    """Share of right guesses, the newest counting most; each at the one token that follows."""
    is_paired: bool

    def note(self, is_right: bool) -> None:
        self.right += _NEWEST * (is_right - self.right)


class Speculator:
    """Drafts for the answers of one session. Used by the compute thread of the sampler."""

    def __init__(
        self, drafters: Mapping[Speculation, Drafter], *, has_experts: bool = False
    ) -> None:
        """drafters: by the ways to speculate; "auto" drafts as "lookup" does. has_experts: rows of
        a step may use other weights each."""
        self.seconds = StepSeconds()
        self.follower: Follower | None = None
        """Drafts for "mtp", and is told hidden states."""
        self._begins, self._ends = _PAYS_WITH_EXPERTS if has_experts else _PAYS
        self._drafters = drafters
        self._answers: dict[str, _Answer] = {}

    def draft(
        self,
        request: str,
        tokens: Sequence[int],
        *,
        prompt_tokens: int,
        speculate: Speculation,
        most: int,
    ) -> tuple[int, ...]:
        """The draft for the next step of a request with these tokens; empty: a row alone.

        Where guesses are missing, the last token stands for them.
        """
        if speculate == "off" or most < 1:
            return ()
        answer = self._answers.get(request)
        if answer is None:
            always = speculate != "auto"
            drafter = self._drafters.get(speculate, self._drafters["lookup"])
            answer = _Answer(drafter, prompt_tokens, _EXPECTED if always else 0.0, always)
            self._answers[request] = answer
        if answer.drafter.looks_back:
            for end in range(answer.end, len(tokens)):
                guess = answer.drafter.propose(request, tokens, end, 1)
                answer.note(bool(guess) and guess[0] == tokens[end])
                if speculate == "auto":
                    least = self._ends if answer.is_paired else self._begins
                    answer.is_paired = answer.right >= least
        answer.end = len(tokens)
        if not answer.is_paired:
            return ()
        if not answer.drafter.looks_back:  # each guess takes its time
            most = draft_length(answer.right, self.seconds, most)
        guesses = answer.drafter.propose(request, tokens, len(tokens), most)
        length = draft_length(answer.right, self.seconds, len(guesses))
        return (*guesses[:length], *(tokens[-1] for _ in range(length - len(guesses))))

    def verified(self, request: str, drafted: int, accepted: int) -> None:
        """The outcome of a draft."""
        if (answer := self._answers.get(request)) is None:
            return
        answer.drafter.accepted(request, drafted, accepted)
        if not answer.drafter.looks_back:
            for number in range(min(accepted + 1, drafted)):
                answer.note(number < accepted)

    def forget(self, request: str) -> None:
        if (answer := self._answers.pop(request, None)) is not None:
            answer.drafter.forget(request)
