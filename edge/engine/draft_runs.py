"""Runs with drafts: each step verifies guesses, and over several stages further ones follow it.

While a step is under way in one stage, the others would wait. So the sampler tells guesses that
follow those of a step before it knows whether they are right (steps ahead; as in PEARL, Liu et al.,
2024, but between stages). Every shard computes all steps in the order in which it is told them.
After a wrong guess the sampler begins anew at the first token that differs, and drops what still
comes of the steps ahead; shards write over their keys and values.

Used by the compute thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edge.backends.interface import StageCompute, StageProgram, StepLogits
from edge.engine.distributed_sampling import Chosen, DistributedSampling
from edge.engine.shard_links import ShardLinks
from edge.engine.speculation import Speculator
from edge.engine.timing import ShardCounters
from edge.protocol.step import MOST_DRAFTED, FinishReason, Guesses, Step

_GOES_ON, _IS_OVER, _ASKS = 0, -1, -2
"""The sampler tells a further step; ends the run; or asks its stage for all logits, and then says
one of the other two."""

_MOST_AHEAD = 3
"""Steps ahead of the one that is verified next."""

_LEAST_CHANCE = 0.4
"""Chance that a step ahead follows right guesses only, below which it is not worth the delay that
it is for a step after a wrong guess."""


_MOST_UNHEARD = 32
"""Outcomes that are left unheard: the sampler never waits until its small messages are read."""


class _Told(NamedTuple):
    """A message of the sampler in a run with drafts."""

    kind: int
    settled: int
    """Tokens of the request that are right and computed."""
    position: int
    """Where the first of `tokens` stands."""
    tokens: tuple[int, ...]
    """The new tokens of the next step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRuns:
    """One shard's part of runs with drafts."""

    links: ShardLinks
    choice: DistributedSampling
    speculator: Speculator
    times: ShardCounters
    compute: Callable[[Step, StageCompute], StepLogits | None]
    follow: Callable[[Step, StepLogits, int], None]
    """Told, for a drafter that reads hidden states, how many tokens a step gave."""
    computed: Callable[[Step], None]
    """Called with each step whose tokens are right, before its tokens are reported; on stages
    before the last one perhaps when the next step begins."""
    report: Callable[
        [Step, Sequence[Chosen], Sequence[FinishReason | None], float, bool, Sequence[Guesses]],
        None,
    ]
    """The step, its tokens, why they end the answer, when they were chosen, whether the run is
    over, and guesses for a later step."""
    must_yield: Callable[[], bool]
    rewinds: bool
    """Requests have states; see `Step.drafting`."""
    cut_end: Callable[[int], int] | None
    """See `SchedulingLimits`."""
    unheard: deque[Step] = field(default_factory=deque)
    """Runs of one step whose outcome was not heard. Stages before the last one compute steps of
    other requests meanwhile; not with states, as one state before guesses is kept."""
    unsettled: dict[str, Step] = field(default_factory=dict)
    """The newest of them by request, while its wrong guesses are still cached. They are cut off
    once the outcome is heard, or the request's next step begins."""
    goes_ahead: bool
    """Whether there are steps ahead: the sampler is alone in its stage, behind other stages, and
    keys and values can be cut anywhere."""

    def run(self, step: Step, program: StageProgram) -> Iterator[Step]:
        """Run the step and those that follow. Yields after each that was computed."""
        if self.links.is_sampler:
            yield from self._lead(step, program)
        else:
            yield from self._follow(step, program)

    def _lead(self, step: Step, program: StageProgram) -> Iterator[Step]:
        """As the sampler."""
        ahead: deque[Step] = deque()
        dropped: list[Step] = []
        ends_at_once = step.ends_at_once
        begun_s = 0.0  # when the step before was verified, unless others were ahead of it
        while True:
            for each in dropped:
                self._receive(each, program)
            dropped.clear()
            self.times.begin(is_decode=step.is_decode)
            logits = self.compute(step, program)
            assert logits is not None
            started_s = time.perf_counter()
            chosen = self.choice.choose(step, logits, partial(self._ask, step))
            chosen_s = time.monotonic()
            (entry,) = step.entries
            known, terms = self.choice.known(step)
            first = entry.end - entry.logit_rows + 1
            if not self.choice.is_led(step):
                tokens = [each.token for each in chosen]
                del chosen[self.speculator.settle(entry.request, known, first, tokens, terms) :]
            ends = self.choice.take(step, [each.token for each in chosen])
            del chosen[len(ends) :]
            self.follow(step, logits, len(chosen))
            if step.is_decode and begun_s:
                self.speculator.seconds.note(step.num_tokens, chosen_s - begun_s)
            begun_s = 0.0 if ahead else chosen_s
            settled = entry.end - entry.logit_rows + len(chosen)
            if step.drafted:
                self.speculator.verified(entry.request, step.drafted, len(chosen) - 1)
            is_cancelled = self.must_yield() or self.choice.ends_run(step)
            is_over = is_cancelled or any(ends) or len(chosen) == step.run or ends_at_once
            guesses: Sequence[Guesses] = ()
            if is_over:
                self._tell(step, _Told(_IS_OVER, settled, 0, ()))
                if not any(ends):
                    guesses = self._guess(step, [each.token for each in chosen], settled)
            else:
                tokens = [each.token for each in chosen]
                is_right = settled == entry.end and self.speculator.is_paired(entry.request)
                if not (is_right and ahead and _first(ahead[0]) == tokens[-1]):
                    dropped += ahead
                    ahead.clear()
                self._go_on(step, tokens, settled, ahead)
                if begun_s:  # guesses take time of their own
                    begun_s = time.monotonic()
            self.computed(step.cut(entry.end - settled))  # meanwhile others run the next step
            self.report(step, chosen, ends, chosen_s, is_over, guesses)
            self.times.now.sample_s += time.perf_counter() - started_s
            if is_over or self.rewinds:
                self._cut(step, settled, program)
            yield step
            if is_over:
                for each in (*dropped, *ahead):
                    self._receive(each, program)
                return
            step = ahead.popleft()

    def _go_on(self, step: Step, tokens: Sequence[int], settled: int, ahead: deque[Step]) -> None:
        """Tell the next step, and steps ahead of it, after this one gave `tokens`."""
        (entry,) = step.entries
        ((known, terms),) = self.choice.settle(step, tokens)

        def tell(position: int, draft: Sequence[int], before: Step) -> None:
            ahead.append(before.drafting(position, draft, rewinds=self.rewinds))
            self._tell(step, _Told(_GOES_ON, settled, position, tuple(draft)))

        if not ahead:
            again = settled - entry.position if self.rewinds and settled < entry.end else 0
            left = step.run - len(tokens)
            draft = self.speculator.draft(
                entry.request,
                known,
                terms,
                most=min(step.drafts - again, max(1, left - 1), self._room(settled) - 1),
                again=again,
            )
            tell(settled, (tokens[-1], *draft), step)
        while self.goes_ahead and len(ahead) <= _MOST_AHEAD:
            last = ahead[-1]
            guessed = [token for each in ahead for token in each.entries[0].tokens][1:]
            room = self._room(ahead[0].entries[0].position, last.entries[0].end)
            most = min(1 + step.drafts, last.run - last.logit_rows, room) // 2 * 2
            if not last.drafted or most < 2:
                return
            draft = self.speculator.ahead(
                entry.request, known, guessed, most, least_chance=_LEAST_CHANCE
            )
            if not draft:
                return
            tell(last.entries[0].end, draft, last)

    def _guess(self, step: Step, tokens: Sequence[int], settled: int) -> Sequence[Guesses]:
        """Guesses behind the last tokens of a run that ends while its request goes on."""
        (entry,) = step.entries
        if self.choice.is_led(step) or (self.rewinds and settled < entry.end):
            return ()
        ((known, terms),) = self.choice.settle(step, tokens)
        most = min(step.drafts, self._room(settled) - 1)
        return self.speculator.in_turn([(entry.request, known, terms)], most=most, at_once=1)

    def _room(self, position: int, end: int | None = None) -> int:
        """Rows that steps may have from `end` on, or `position`, so that the request can still be
        cut at any position after `position`."""
        begin = position if end is None else end
        return 1 + MOST_DRAFTED if self.cut_end is None else self.cut_end(position) - begin

    def _follow(self, step: Step, program: StageProgram) -> Iterator[Step]:
        """As any other shard."""
        unsettled: deque[Step] = deque()
        ends_at_once = step.ends_at_once
        while True:
            self.times.begin(is_decode=step.is_decode)
            logits = self.compute(step, program)
            if logits is None and ends_at_once and not self.rewinds:
                self.unheard.append(step)
                self.unsettled[step.entries[0].request] = step
                yield step
                return
            if logits is not None:
                started_s = time.perf_counter()
                self.choice.offer(step, logits)
                self.times.now.sample_s += time.perf_counter() - started_s
            unsettled.append(step)
            told = self._hear(step, logits)
            self._settle(unsettled, told)
            is_over = told.kind == _IS_OVER
            if is_over or self.rewinds:
                self._cut(step, told.settled, program)
            yield step
            if is_over:
                return
            step = step.drafting(told.position, told.tokens, rewinds=self.rewinds)

    def before(self, step: Step, program: StageProgram) -> None:
        """Settle earlier steps before one that follows them, or that hears its own outcome."""
        while self.unheard and not step.ends_at_once:
            self._hear_oldest(program)
        for entry in step.entries:
            self._settle_one(entry.request, entry.position, program)
        while len(self.unheard) > _MOST_UNHEARD:
            self._hear_oldest(program)

    def hear_of(self, request: str, program: StageProgram) -> None:
        """Hear the outcome of the request's last step, unless it is settled."""
        while request in self.unsettled:
            self._hear_oldest(program)

    def _hear_oldest(self, program: StageProgram) -> None:
        step = self.unheard.popleft()
        told = self._hear(step, None)
        request = step.entries[0].request
        if self.unsettled.get(request) is step:
            self._settle_one(request, told.settled, program)

    def _settle_one(self, request: str, settled: int, program: StageProgram) -> None:
        step = self.unsettled.pop(request, None)
        if step is not None:
            self.computed(step.cut(max(0, step.entries[0].end - settled)))
            self._cut(step, settled, program)

    def _settle(self, unsettled: deque[Step], told: _Told) -> None:
        """Hand on what is right of the steps that were computed, and forget what was wrong."""
        while unsettled and unsettled[0].entries[0].position < told.settled:
            step = unsettled.popleft()
            self.computed(step.cut(max(0, step.entries[0].end - told.settled)))
        while unsettled and unsettled[-1].entries[0].position >= told.position:
            unsettled.pop()

    def _cut(self, step: Step, settled: int, program: StageProgram) -> None:
        """Forget what is not settled; with states, all of a step that had a wrong guess."""
        (entry,) = step.entries
        if not self.rewinds:
            program.cut(entry.request, settled)
        elif settled < entry.end:
            program.cut(entry.request, entry.position)

    def _receive(self, step: Step, program: StageProgram) -> None:
        """Receive what nobody needs any more."""
        self.links.receive_hidden(program.receive_buffer(step))

    def _tell(self, step: Step, told: _Told) -> None:
        message = _message(step)
        message[:4] = (told.kind, told.settled, told.position, len(told.tokens))
        message[4 : 4 + len(told.tokens)] = told.tokens
        self.links.tell_all(message)

    def _ask(self, step: Step) -> None:
        message = _message(step)
        message[0] = _ASKS
        self.links.tell_stage(message)

    def _hear(self, step: Step, own: StepLogits | None) -> _Told:
        message = _message(step)
        start_s = time.perf_counter()
        self.links.hear(message)
        if message[0] == _ASKS and own is not None:
            self.choice.send_logits(own)
            self.links.hear(message)
        self.times.now.receive_s += time.perf_counter() - start_s
        kind, settled, position, count = message[:4].tolist()
        return _Told(kind, settled, position, tuple(message[4 : 4 + count].tolist()))


def _first(step: Step) -> int:
    return step.entries[0].tokens[0]


def _message(step: Step) -> NDArray[np.int64]:
    return np.zeros(5 + step.drafts, np.int64)
