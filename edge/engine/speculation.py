"""Speculation at the sampler: whether the next step verifies a draft, and how long it is.

A row alone is rounded in another way than a row of a step of several rows. So two things are
decided apart. Whether an answer's rows are computed in pairs follows from its tokens alone, so
that its last bits do not depend on time, on wrong guesses, or on where a run was interrupted. How
long a draft is, which changes no bit, follows from the time of steps. An answer with states stays
in pairs once it is: after a wrong guess its right rows are computed again in the next step, however
many they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from edge.engine.drafter import Drafter
from edge.engine.further_drafter import Follower
from edge.partition import draft_length, most_in_turn
from edge.protocol.step import (
    MOST_IN_TURN,
    NO_GUESSES,
    Guesses,
    SamplingTerms,
    Speculation,
)

_NEWEST = 0.2
"""Weight of the newest guess in the share of right ones."""
_EXPECTED = 0.5
"""Share of right guesses that an answer begins with whose rows are always in pairs."""

_PAYS, _PAYS_WITH_EXPERTS = (0.55, 0.45), (0.8, 0.7)
"""Shares of right guesses at which "auto" begins to draft, and below which it ends. On CPUs two
rows take from 1.07 to 1.4 times as long as one; where they use different experts, up to twice. The
time of steps does not decide, because the last bits of an answer would depend on it."""

_SURE = 0.67
"""Share of right guesses at which "auto" begins even if it may not lose a step."""
_SPARED, _COST, _GAIN = 0.03, 1.0, 0.5
"""Share of an answer's steps that "auto" may lose; what a wrong guess costs at most, and what a
right one gains at least, in steps."""

_SLOPE = 0.15
"""Time of a further row relative to the step, before steps of two numbers of rows were timed."""
_NEWEST_TIME, _MOST_SLOWER = 0.3, 2.0
"""Weight of the newest time; a slower step than this multiple of the mean is an outlier."""


class StepSeconds:
    """The time of decode steps by their rows: as measured; or as predicted, relative to the nearest
    number of rows that was measured; or by a line through the nearest two."""

    def __init__(self, predicted: Mapping[int, float] | None = None) -> None:
        """predicted: by some numbers of rows, the smallest and the largest included."""
        self._predicted = dict(predicted or {})
        self.known: dict[int, float] = {}
        self.similar: Mapping[int, float] = {}
        """Times of steps of another kind, which count until one of this kind was timed."""
        self._begun: set[int] = set()
        """Rows of steps that were run once. The first takes longer: back ends prepare for it."""

    def note(self, rows: int, seconds: float) -> None:
        if rows not in self._begun:
            self._begun.add(rows)
            return
        before = self.known.get(rows)
        if before is not None:
            seconds = before + _NEWEST_TIME * (min(seconds, _MOST_SLOWER * before) - before)
        self.known[rows] = seconds

    def of(self, rows: int) -> float:
        """Seconds of a step of `rows` rows; in a unit of its own if no step was timed."""
        known = self.known or self.similar
        if rows in known:
            return known[rows]
        if self._predicted:
            if not known:
                return self._as_predicted(rows)
            nearest = min(known, key=lambda each: (abs(each - rows), each))
            return known[nearest] * self._as_predicted(rows) / self._as_predicted(nearest)
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

    def _as_predicted(self, rows: int) -> float:
        return float(np.interp(rows, [*self._predicted], [*self._predicted.values()]))


@dataclass(slots=True)
class _Answer:
    """What is known of the guesses of one answer."""

    drafter: Drafter
    end: int
    """Its tokens so far."""
    right: float
    """Share of right guesses, the newest counting most; each at the one token that follows."""
    is_paired: bool
    room: float = 0.0
    """Steps that guesses may still cost: a share of its tokens, and what was gained."""
    guessed: int = 0
    """Guesses of the last draft; the rest of it stands for missing ones."""

    def note(self, is_right: bool) -> None:
        self.right += _NEWEST * (is_right - self.right)


class Speculator:
    """Drafts for the answers of one session. Used by the compute thread of the sampler."""

    def __init__(
        self,
        drafters: Mapping[Speculation, Drafter],
        *,
        has_experts: bool = False,
        rewinds: bool = False,
        predicted: Mapping[int, float] | None = None,
    ) -> None:
        """drafters: by the ways to speculate; "auto" drafts as "lookup" does. has_experts: rows of
        a step may use other weights each. rewinds: see `draft_length`.
        predicted: see `StepSeconds`."""
        self._rewinds = rewinds
        self.seconds = StepSeconds(predicted)
        self.shared_seconds = StepSeconds(predicted)
        """Times of steps with a row of each of several requests, which read other keys and
        values."""
        self.seconds.similar = self.shared_seconds.known
        self.shared_seconds.similar = self.seconds.known
        self.follower: Follower | None = None
        """Drafts for "mtp", and is told hidden states."""
        self._begins, self._ends = _PAYS_WITH_EXPERTS if has_experts else _PAYS
        self._drafters = drafters
        self._answers: dict[str, _Answer] = {}

    def settle(
        self,
        request: str,
        tokens: Sequence[int],
        end: int,
        chosen: Sequence[int],
        terms: SamplingTerms,
    ) -> int:
        """How many of the tokens that a step chose are used: those up to the first whose row is to
        be computed alone. chosen: the tokens at `end` and behind it."""
        answer = self._followed(request, tokens, end, terms)
        if answer is None or not answer.drafter.looks_back:
            return len(chosen)
        for count, token in enumerate(chosen, start=1):
            was_paired = answer.is_paired
            self._see(request, answer, tokens, token, terms)
            if was_paired and not answer.is_paired:
                return count
        return len(chosen)

    def foresee(self, request: str, tokens: Sequence[int], speculate: Speculation) -> None:
        """Announce the first tokens of a prompt."""
        if (drafter := self._drafters.get(speculate)) is not None:
            drafter.foresee(request, tokens)

    def draft(
        self,
        request: str,
        tokens: Sequence[int],
        terms: SamplingTerms,
        *,
        most: int,
        again: int = 0,
    ) -> tuple[int, ...]:
        """The draft for the next step of a request with these tokens; empty: no guess.

        Where guesses are missing, the last token stands for them. again: rows before the last
        token that the step computes again.
        """
        answer = self._followed(request, tokens, len(tokens), terms)
        if answer is None or most + again < 1 or not (answer.is_paired or again):
            return ()

        def best(most: int) -> int:
            return draft_length(
                answer.right,
                self.seconds.of,
                most,
                again=again,
                rewinds=self._rewinds,
                guess_s=answer.drafter.guess_s,
            )

        guesses: Sequence[int] = ()
        if answer.is_paired and most > 0 and (wanted := best(most)):
            guesses = answer.drafter.propose(request, tokens, len(tokens), wanted)
        length = best(len(guesses))
        answer.guessed = min(length, len(guesses))
        return (*guesses[:length], *(tokens[-1] for _ in range(length - len(guesses))))

    def in_turn(
        self,
        answers: Sequence[tuple[str, Sequence[int], SamplingTerms]],
        *,
        most: int,
        at_once: int,
    ) -> Sequence[Guesses]:
        """Guesses for a step of each answer's own; empty: there are none.

        answers: each request, its tokens and its terms. at_once: more answers than this take turns,
        if it is faster for each. Only drafters that look back guess: the others follow one answer.
        """
        known = [self._followed(*each[:2], len(each[1]), each[2]) for each in answers]
        able = [each is not None and each.is_paired and each.drafter.looks_back for each in known]
        if most < 1 or not (all(able) if len(able) > at_once else any(able)):
            return ()
        seconds, shared = cache(self.seconds.of), cache(self.shared_seconds.of)
        found = []
        for (request, tokens, _terms), answer, is_able in zip(answers, known, able, strict=True):
            guesses: Sequence[int] = ()
            if answer is not None and is_able:
                wanted = draft_length(answer.right, seconds, most, rewinds=self._rewinds)
                guesses = answer.drafter.propose(request, tokens, len(tokens), wanted)
            if answer is None or not guesses:
                found.append(NO_GUESSES)
                continue
            length = draft_length(answer.right, seconds, len(guesses), rewinds=self._rewinds)
            fitting = most_in_turn(
                answer.right,
                seconds,
                shared,
                length=min(length, len(guesses)),
                most=MOST_IN_TURN,
                rewinds=self._rewinds,
            )
            found.append(Guesses(tokens=tuple(guesses[:length]), in_turn=fitting))
        return found if any(each.tokens for each in found) else ()

    def _followed(
        self, request: str, tokens: Sequence[int], end: int, terms: SamplingTerms
    ) -> _Answer | None:
        """What is known of the answer after its first `end` tokens; None: it has no drafts."""
        if terms.speculate == "off":
            return None
        answer = self._answers.get(request)
        if answer is None:
            always = terms.speculate != "auto"
            drafter = self._drafters.get(terms.speculate, self._drafters["lookup"])
            right = _EXPECTED if always else 0.0
            answer = _Answer(drafter, min(terms.prompt_tokens, end), right, always)
            self._answers[request] = answer
        while answer.drafter.looks_back and answer.end < end:
            self._see(request, answer, tokens, tokens[answer.end], terms)
        return answer

    def _see(
        self,
        request: str,
        answer: _Answer,
        tokens: Sequence[int],
        token: int,
        terms: SamplingTerms,
    ) -> None:
        """Compare the answer's next token with what would have been guessed."""
        guess = answer.drafter.propose(request, tokens, answer.end, 1)
        is_right = bool(guess) and guess[0] == token
        answer.note(is_right)
        answer.end += 1
        answer.room += _SPARED
        if answer.is_paired:
            answer.room += _GAIN if is_right else -_COST
        if terms.speculate == "auto" and not (self._rewinds and answer.is_paired):
            least = self._ends if answer.is_paired else self._begins
            if not answer.is_paired and answer.room < _COST:
                least = max(least, _SURE)
            answer.is_paired = answer.right >= least

    def ahead(
        self,
        request: str,
        tokens: Sequence[int],
        guessed: Sequence[int],
        most: int,
        *,
        least_chance: float,
    ) -> tuple[int, ...]:
        """`most` guesses behind those that are under way, for a step ahead; empty if it would
        follow a wrong one with more than a chance of 1 − `least_chance`.

        tokens: those that are known. guessed: the guesses behind them that are under way.
        """
        answer = self._answers.get(request)
        if answer is None or not answer.is_paired or not answer.drafter.looks_back:
            return ()
        if answer.right ** (len(guessed) + 1) < least_chance:
            return ()
        count = len(guessed) + most
        guesses = answer.drafter.propose(request, tokens, len(tokens), count)
        if len(guesses) < count or list(guesses[: len(guessed)]) != list(guessed):
            return ()
        return tuple(guesses[len(guessed) :])

    def is_paired(self, request: str) -> bool:
        """Whether the row of its newest token is computed in a step of an even number of rows."""
        answer = self._answers.get(request)
        return answer is not None and answer.is_paired

    def verified(self, request: str, drafted: int, accepted: int) -> None:
        """The outcome of a draft."""
        if (answer := self._answers.get(request)) is None:
            return
        answer.drafter.accepted(request, drafted, accepted)
        if not answer.drafter.looks_back:
            for number in range(min(accepted + 1, answer.guessed)):
                answer.note(number < accepted)
        answer.guessed = 0

    def forget(self, request: str) -> None:
        if (answer := self._answers.pop(request, None)) is not None:
            answer.drafter.forget(request)
