"""The scheduler: what the peers are to do next. Pure: knows no peers, text or time.

Whose keys and values are in memory is `kv_residency.py`'s to decide; of those, three rules.
Requests that each wait for one token go together, because a batch reads the weights once for all of
them. Prompts come in chunks, turn by turn with those batches, and while there are some in chunks
that take no longer (`pacing.py`), so that a long prompt does not hold up other replies. And only as
many steps are under way as keep every stage busy: what is handed out cannot be reordered any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from edge.coordinator.beginnings import (
    Beginnings,
    Spans,
    common_tokens,
    cut,
    joined,
    next_chunk,
)
from edge.coordinator.kv_residency import Member, Residency
from edge.coordinator.pacing import Pacing, time_of_prompts
from edge.coordinator.saved_states import Save, SavedStates
from edge.coordinator.shares import ANSWER_WEIGHT, ANYBODY, Who
from edge.coordinator.work import Work
from edge.offload.kv.slot_order import SlotOrder
from edge.protocol.step import (
    MAX_CHUNK_TOKENS,
    SHORTEST_STEP,
    FinishReason,
    Rows,
    Step,
    StepEntry,
)

REPEATED_TOKENS = 32
"""Of an answer, in one step: whoever comes meanwhile waits no longer than for that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A prompt, of whose beginning peers may have keys and values."""

    prompt: tuple[int, ...]
    source: str | None = None
    """Whose cache begins with the first `tokens` of them; None: none in memory."""
    tokens: int = 0
    moves: bool = False
    """The cache is this request's from now on."""
    singly: Spans = ()
    """Of these tokens, those that were computed one at a time."""


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
    """Of requests that are over, until `drop`, or a match that moves it."""
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
    """So many tokens of these requests' answers, whose keys and values every shard is given, as it
    is those of the prompt, unless that was handed out before."""
    step: Step | None = None
    """None while everything waits for an answer."""


@dataclass(slots=True)
class _Entry:
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
    restored: int = 0
    """Tokens of the answer that are given, once the prompt is computed; or"""
    restores_prompt: bool = False
    """with it."""
    computed: int = 0
    singly: Spans = ()
    """Of the prompt's tokens, those that were computed one at a time, or are to be."""
    is_repeated: bool = False
    """Another plan has computed it before, in those steps."""
    saves: set[int] = field(default_factory=set)
    """Behind so many of the prompt's tokens a state is to be saved."""
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


class Scheduler:
    """Turns requests into orders: `decide` until there is no step, and after all it is told."""

    def __init__(
        self,
        *,
        chunk_tokens: int,
        logit_chunk_tokens: int,
        state_chunk_tokens: int = MAX_CHUNK_TOKENS,
        residency: Residency,
        stages: int,
        asks_peers: bool = False,
        beginnings: Beginnings | None = None,
        saved: SavedStates | None = None,
    ) -> None:
        """`stages` steps decode at once, of the requests that are in memory. logit_chunk_tokens
        and state_chunk_tokens: the most of a step whose logits, or hidden states, all travel.

        beginnings: what requests leave in memory; None: nothing. asks_peers: they may have more,
        of earlier plans or on disk. saved: where layers have states, those that are saved.
        """
        self._rows_agree = self._batches_agree = False
        self._pacing = Pacing()
        self._last_s: float | None = None
        """When the last answer was given, to a step that the next one waited for."""
        self._asks_peers = asks_peers
        self._beginnings = beginnings
        self._saved = saved
        self._saves: list[Save] = []
        self._stateless: list[str] = []
        """Kept, and of no use any longer."""
        self._chunk_tokens = chunk_tokens
        self._row_chunk_tokens: Mapping[Rows, int] = {
            "logits": logit_chunk_tokens,
            "states": state_chunk_tokens,
            "last state": chunk_tokens,
        }
        self._residency = residency
        self._shares = residency.shares
        self._stages = stages
        self._active: dict[str, _Entry] = {}
        self._turns: deque[str] = deque()
        """Requests with prompt left to compute."""
        self._under_way: deque[Step] = deque()
        self._wanted: deque[int] = deque()
        """How many tokens each of them gives."""
        self._decoded_last = False
        self._finished: list[str] = []
        self._kept: dict[str, Kept] = {}
        self._come: list[str] = []
        """In memory, and their beginnings not looked for yet."""
        self._given_up: dict[str, str] = {}
        self._disk_full = ""
        self._slots = SlotOrder()
        """Where caches lie in a shard's pool once the orders so far are carried out. Of no
        consequence but for the copies that batches in this order save."""
        self.work = Work()
        if beginnings is not None:
            residency.found = self._found

    def rows_agree(self) -> None:
        """A row is the same however many others are in its step, as long as they are even: a prompt
        may be cut, and a beginning end, behind any two tokens."""
        self._rows_agree = True
        if self._beginnings is not None:
            self._beginnings.unit_tokens = SHORTEST_STEP

    def batches_agree(self) -> None:
        """A token is the same whichever requests are in its step: several answers may be repeated
        together."""
        self._batches_agree = True

    def add(
        self,
        request: str,
        prompt: Sequence[int],
        *,
        new_tokens: int,
        answer: Sequence[int] = (),
        restored: int = 0,
        restores_prompt: bool = False,
        singly: Spans = (),
        is_repeated: bool = False,
        is_led: bool = False,
        who: Who = ANYBODY,
        rows: Rows = "logits",
    ) -> None:
        """Start a request for `new_tokens` tokens, or with 0 for `rows`.

        answer: tokens that follow the prompt and that another plan has chosen. restored: so many of
        them need not be computed, because their keys and values can be given; restores_prompt:
        those of the prompt, too. is_repeated: another plan has begun with it, and of its prompt it
        computed `singly` one at a time. is_led: what its next token may be is told with each step.
        who: asked, and how urgently. Raises ValueError for one that could never start.
        """
        most_restored = max(0, len(answer) - 1)
        if not prompt or new_tokens < 0 or not restores_prompt <= restored <= most_restored:
            raise ValueError("a request needs tokens")
        tokens = [*prompt, *answer]
        if request in self._active or (
            self._beginnings is not None and request in self._beginnings
        ):
            raise ValueError("a request needs an id of its own")
        member = Member(request, len(tokens), len(tokens) + new_tokens, who)
        self._residency.join(member)
        self._shares.come(who)
        self._active[request] = _Entry(
            request,
            tokens,
            member,
            len(prompt),
            rows=None if new_tokens else rows,
            singly=cut(singly, max(0, len(prompt) - SHORTEST_STEP)),
            is_repeated=is_repeated,
            restored=restored,
            restores_prompt=restores_prompt,
            is_led=is_led,
            who=who,
        )

    def cancel(self, request: str) -> None:
        """Forget a request; steps under way still complete. Unknown ones are ignored."""
        gone = self._active.pop(request, None)
        if gone is None:
            return
        self._leave(gone, has_ended=False)

    def _leave(self, gone: _Entry, *, has_ended: bool) -> None:
        """has_ended: the peers have computed nothing behind its tokens, and will not."""
        self._shares.go(gone.who)
        if not self._keep(gone, has_ended=has_ended):
            if self._saved is not None:
                self._saved.drop(gone.request)
            self._residency.leave(gone.memory)
            self._finished.append(gone.request)

    def decide(self) -> Orders:
        """What is to be done now. It counts as done: the next orders build on these."""
        yields = self._should_yield
        while (settled := self._residency.settle()).stuck is not None:
            self._give_up(settled.stuck, self._disk_full)
        self._come.extend(settled.came)
        keep = {name: self._as_saved(name, kept) for name, kept in self._kept.items()}
        match = self._look_for_beginnings()
        dropped: tuple[str, ...] = ()
        if self._beginnings is not None:  # else nothing is kept
            spared = [each.source for each in match.values()]
            dropped = self._residency.crowded_out(self._beginnings.cost, spared)
            for name in dropped:
                self._beginnings.drop(name)
                if self._saved is not None:
                    self._saved.drop(name)
        orders = Orders(
            yields=yields,
            save=tuple(self._saves),
            finish=tuple(self._finished),
            keep=keep,
            drop=(*self._stateless, *dropped),
            give_up=dict(self._given_up),
            swap_out=settled.swap_out,
            reserve=settled.reserve,
            match=match,
            restore=self._restore(),
        )
        self._finished.clear()
        self._kept.clear()
        self._given_up.clear()
        self._saves.clear()
        self._stateless.clear()
        self._follow(orders)
        # What it saves, and takes the places of, comes with the next orders, behind it.
        return replace(orders, step=self._next_step())

    def _follow(self, orders: Orders) -> None:
        """What becomes of the slots before a step."""
        for name in (*orders.finish, *orders.drop, *orders.swap_out):
            self._slots.release(name)
        for name, match in orders.match.items():
            if match.source is None:
                continue
            if match.moves and match.source in self._slots:
                self._slots.rename(match.source, name)
            else:
                self._slots.open(name)
        for name in orders.restore:
            self._slots.open(name)

    def matched(self, request: str, tokens: int) -> int:
        """Every shard has N tokens of the prompt; how many are not computed: some must."""
        entry = self._active.get(request)
        if entry is None:
            return 0  # cancelled meanwhile
        if not 0 <= tokens <= max(0, entry.prompt_tokens - SHORTEST_STEP):
            raise ValueError(f"{tokens} tokens known of a prompt of {entry.prompt_tokens}")
        if self._saved is not None:  # less of it is of no use
            entry.computed = tokens if tokens == entry.asked else 0
            if not entry.computed:
                self._saved.drop(request)
        else:
            entry.computed = self._useful(tokens, entry.prompt_tokens, entry.singly)
        if not entry.is_repeated:
            entry.singly = cut(entry.singly, entry.computed)
        self._start(entry)
        return entry.computed

    def made_singly(self, request: str) -> Spans:
        """Of the prompt's tokens that were found, those that were computed one at a time."""
        entry = self._active.get(request)
        return () if entry is None else entry.singly

    def reserved(self, request: str, *, why_not: str | None) -> None:
        """Every shard has that room; or one has not, and the request is given up."""
        entry = self._active.get(request)
        if entry is None:
            return  # cancelled meanwhile
        if why_not is None:
            self._residency.reserved(entry.memory)
        else:
            self._give_up(request, why_not)

    def swapped_out(self, request: str, *, why_not: str | None) -> None:
        """Every shard has moved the cache; or not all could, and it stays."""
        self._disk_full = why_not or self._disk_full
        entry = self._active.get(request)
        if entry is not None:  # else cancelled meanwhile
            self._residency.swapped_out(entry.memory, moved=why_not is None)

    def answered(
        self,
        tokens: Sequence[int],
        ends: Sequence[FinishReason | None],
        *,
        last: bool,
        at_s: float | None = None,
    ) -> Step:
        """The oldest step under way gave a token for each entry that wanted one; that step.

        Requests that end with their token are over. A run gives tokens several times; `last` is its
        end. at_s: when it was computed, by a clock of the peers; None: nobody knows. Raises
        ValueError for an answer to no step, with the wrong number of tokens, or to a request that
        has had its last.
        """
        if not self._under_way:
            raise ValueError("an answer to no step")
        step, wanted = self._under_way[0], self._wanted[0]
        if len(tokens) != wanted:
            raise ValueError(f"{len(tokens)} tokens for a step that gives {wanted}")
        if at_s is not None and self._last_s is not None:
            self._observe(step, at_s - self._last_s)
        if last:
            self._under_way.popleft()
            self._wanted.popleft()
        self._last_s = at_s if self._under_way else None
        self.work += Work(answer_tokens=len(tokens), steps=int(not last))
        for part, token, end in zip(step.entries, tokens, ends, strict=False):
            entry = self._active.get(part.request)
            if entry is None:
                continue  # cancelled meanwhile
            entry.tokens.append(token)
            self._shares.give(entry.who, ANSWER_WEIGHT)
            entry.memory.length += 1
            entry.computed = len(entry.tokens) - 1
            if end is not None:
                self._leave(self._active.pop(part.request), has_ended=True)
            elif entry.memory.length == entry.memory.longest:
                raise ValueError("a request goes on after its last token")
        if last:
            for part in step.entries:
                entry = self._active.get(part.request)
                if entry is not None:
                    entry.memory.steps_out -= 1
                    if entry.rows is not None and part.end == len(entry.tokens):
                        self.cancel(part.request)
        return step

    def _observe(self, step: Step, seconds: float) -> None:
        if seconds <= 0:
            return  # whose clock that is, only its peer knows
        if step.num_tokens > 1:
            if not step.singly:
                self._pacing.read(step.num_tokens, seconds)
        elif any(part.logit_rows for part in step.entries):
            self._pacing.decoded(seconds)

    @property
    def _should_yield(self) -> bool:
        return bool(
            self._under_way
            and self._under_way[-1].run > 1
            and (self._turns or self._repeats or self._residency.awaits_room)
        )

    @property
    def _repeats(self) -> list[_Entry]:
        """Requests with parts of an answer that another plan has computed before."""
        return [
            entry for entry in self._active.values() if entry.to_repeat and entry.memory.can_step
        ]

    def _start(self, entry: _Entry) -> None:
        entry.state = "going"
        self._plan_saves(entry)
        if entry.restores_prompt:
            entry.computed = entry.prompt_tokens
            return
        self._turns.append(entry.request)

    def _look_for_beginnings(self) -> dict[str, Match]:
        """Start those that came into memory, or have the peers find what they begin with.

        One that begins like another that is being computed waits for that.
        """
        matches: dict[str, Match] = {}
        waiting: list[str] = []
        for name in self._come:
            entry = self._active.get(name)
            if entry is None:
                continue  # cancelled meanwhile
            if entry.rows is not None or entry.restores_prompt:
                self._start(entry)
            elif self._awaits_another(entry):
                waiting.append(name)
            elif (match := self._match(entry)) is not None:
                entry.state, entry.asked = "matching", match.tokens
                if not entry.is_repeated:
                    entry.singly = match.singly
                matches[name] = match
            else:
                self._start(entry)
        self._come = waiting
        return matches

    def _match(self, entry: _Entry) -> Match | None:
        prompt = tuple(entry.tokens[: entry.prompt_tokens])
        found = None if self._beginnings is None else self._beginnings.find(prompt)
        if found is not None and not entry.may_have(found.singly, found.tokens):
            found = None
        tokens = 0 if found is None else found.tokens
        other = max(self._alike(entry), default=None, key=lambda each: each[0])
        if other is not None and other[0] > tokens:
            if self._saved is not None:
                self._saved.used(other[1].request, other[0])
            return Match(
                prompt=prompt,
                source=other[1].request,
                tokens=other[0],
                singly=cut(other[1].singly, other[0]),
            )
        if found is not None and self._beginnings is not None:
            moves = found.is_whole or not self._residency.can_keep(found.request)
            if self._saved is not None:
                self._saved.used(found.request, tokens)
            if moves:
                self._residency.drop(found.request)
                self._beginnings.drop(found.request)
                if self._saved is not None:
                    self._saved.move(found.request, entry.request, tokens)
            else:
                self._residency.used(found.request)
            return Match(
                prompt=prompt,
                source=found.request,
                tokens=tokens,
                moves=moves,
                singly=found.singly,
            )
        if self._asks_peers and self._useful(len(prompt), len(prompt)):
            return Match(prompt=prompt)
        return None

    def _useful(self, common: int, prompt_tokens: int, singly: Spans = ()) -> int:
        """How many of the tokens that a prompt has in common with another are not computed."""
        if self._beginnings is None:
            return 0
        return self._beginnings.useful(common, prompt_tokens, singly)

    def _found(self, request: str) -> int:
        """Tokens of a request that need not be computed, as it is now."""
        entry = self._active[request]
        if self._beginnings is None or entry.rows is not None:
            return 0
        kept = self._beginnings.find(entry.tokens[: entry.prompt_tokens])
        return max([0 if kept is None else kept.tokens, *(each for each, _ in self._alike(entry))])

    def _alike(self, entry: _Entry) -> Iterator[tuple[int, _Entry]]:
        """Requests under way that begin with the same tokens, and how many of use they have."""
        for other in self._active.values():
            if self._beginnings is None or other.rows is not None or other.memory.place != "memory":
                continue
            if other.state == "going":
                common = min(common_tokens(entry.prompt, other.prompt), other.computed)
                tokens = self._beginnings.useful(
                    common, len(entry.prompt), other.singly, of=other.request
                )
                if tokens and entry.may_have(other.singly, tokens):
                    yield tokens, other

    def _awaits_another(self, entry: _Entry) -> bool:
        """Another request under way will soon have a chunk or more of its beginning."""
        if self._beginnings is None:
            return False
        awaited = self._active.get(entry.awaited)
        if awaited is not None and awaited.computed < entry.awaited_tokens:
            return awaited.will_go_on
        for other in self._active.values():
            if other.state == "coming" or not other.will_go_on:
                continue
            common = common_tokens(entry.prompt, other.prompt)
            if self._saved is not None:
                common = self._parting(min(common, len(entry.prompt) - SHORTEST_STEP), other)
                useful = common
            else:
                useful = self._beginnings.useful(common, len(entry.prompt), other.singly)
            if useful < self._chunk_tokens:
                continue
            if other.computed < common:
                entry.awaited, entry.awaited_tokens = other.request, common
                return True
        return False

    def _parting(self, common: int, other: _Entry) -> int:
        """Where a state of another request is to be saved that has so many tokens in common with
        one to come, and is not that far yet; 0 if nowhere."""
        assert self._beginnings is not None
        assert self._saved is not None
        point = self._beginnings.whole_units(common, other.singly)
        if point <= other.computed:
            return 0
        parting = self._saved.parting(point, other.saves)
        if parting == point:
            other.saves.add(point)
        return parting

    def _plan_saves(self, entry: _Entry) -> None:
        """Where states of a prompt are saved, now that is known how much of it is found."""
        if self._saved is None or self._beginnings is None or entry.rows is not None:
            return
        prompt_tokens = entry.prompt_tokens
        others = [each for each in self._active.values() if each is not entry]
        alike = [common_tokens(entry.prompt, other.prompt) for other in others]
        alike += self._beginnings.common(entry.prompt)
        points = self._saved.worth_saving(prompt_tokens, entry.computed, alike, self._chunk_tokens)
        entry.saves.update(
            self._beginnings.whole_units(min(each, prompt_tokens - SHORTEST_STEP), entry.singly)
            for each in points
        )
        least = entry.computed + self._beginnings.fewest_tokens
        begun = [first for first, _ in entry.singly]
        entry.saves = {
            each
            for each in entry.saves
            # No token is left alone between two steps.
            if each >= least and each + 1 not in begun
        }

    def _save(self, entry: _Entry) -> None:
        """The state behind what is computed of it, if it is worth it."""
        assert self._saved is not None
        tokens = np.asarray(entry.tokens[: entry.computed], np.int64)
        save, gone = self._saved.save(entry.request, tokens)
        self._saves.append(save)
        if gone is not None and self._beginnings is not None and gone in self._beginnings:
            self._beginnings.drop(gone)
            self._residency.drop(gone)
            if self._kept.pop(gone, None) is not None:  # the peers have not been told
                self._finished.append(gone)
            else:
                self._stateless.append(gone)

    def _keep(self, entry: _Entry, *, has_ended: bool) -> bool:
        """Whether what a request that is over leaves behind may be of use."""
        if self._beginnings is None or entry.rows is not None or entry.state != "going":
            return False
        singly = entry.singly
        if entry.computed > entry.prompt_tokens:
            singly = joined(singly, (entry.prompt_tokens, entry.computed))
        tokens = self._beginnings.worth_keeping(entry.computed, singly)
        saves_end = False
        if self._saved is not None:
            saves_end = self._saved.saves_ends and has_ended and tokens == entry.computed
            tokens = tokens if saves_end else self._saved.last(entry.request, tokens)
        if not tokens or not self._residency.keep(entry.memory):
            return False
        if saves_end:
            self._save(entry)
        kept = entry.tokens[:tokens]
        self._beginnings.keep(entry.request, kept, cut(singly, tokens))
        self._kept[entry.request] = Kept(tokens=tokens, answer=tuple(kept[entry.prompt_tokens :]))
        return True

    def _as_saved(self, request: str, kept: Kept) -> Kept:
        """As much of it as a state is saved of, where layers have some: another one may have taken
        the place of the last."""
        if self._saved is None:
            return kept
        tokens = self._saved.last(request, kept.tokens)
        answer_tokens = max(0, len(kept.answer) - (kept.tokens - tokens))
        return Kept(tokens=tokens, answer=kept.answer[:answer_tokens])

    def _give_up(self, request: str, why: str) -> None:
        self.cancel(request)
        self._given_up[request] = why

    def _restore(self) -> dict[str, int]:
        """Answers whose prompts have been handed out, and which are given now."""
        given: dict[str, int] = {}
        for entry in self._repeats:
            if entry.restored:
                given[entry.request] = entry.restored
                entry.computed += entry.restored
                entry.restored = 0
        return given

    def _next_step(self) -> Step | None:
        if len(self._under_way) > self._stages:
            return None
        known = (self._chunk, self._repeat)
        order = (*known, self._decode) if self._decoded_last else (self._decode, *known)
        for choose in order:
            step = choose()
            if step is not None:
                names = [part.request for part in step.entries]
                for name in names:
                    self._slots.open(name)
                self._slots.gather(names)
                self._under_way.append(step)
                self._wanted.append(0)
                self.work += Work(steps=1)
                for part in step.entries:
                    entry = self._active[part.request]
                    entry.memory.steps_out += 1
                    self._wanted[-1] += part.logit_rows > 0 and entry.rows is None
                self._decoded_last = choose == self._decode
                return step
        return None

    def _decode(self) -> Step | None:
        """One token of every request that waits for one; alone, they run on by themselves."""
        if sum(step.num_tokens == 1 for step in self._under_way) >= self._stages:
            return None
        are_ready = {name: entry for name, entry in self._active.items() if entry.is_ready}
        if not are_ready:
            return None
        ready = [are_ready[name] for name in self._slots.arranged(tuple(are_ready))]
        return Step(
            entries=tuple(
                StepEntry(
                    request=entry.request,
                    position=entry.computed,
                    tokens=(entry.tokens[-1],),
                    logit_rows=1,
                )
                for entry in ready
            ),
            run=self._run(ready),
        )

    def _chunk(self) -> Step | None:
        """The next chunk of the prompt whose turn it is."""
        while self._turns:
            entry = self._active.get(self._next_turn())
            if entry is None:
                continue
            start = entry.computed
            span = next((each for each in entry.singly if each[1] > start), None)
            is_single = span is not None and span[0] <= start
            if span is not None and is_single:
                size = min(span[1] - start, REPEATED_TOKENS, self._chunk_tokens)
            else:
                end = entry.prompt_tokens if span is None else span[0]
                end = min([end, *(each for each in entry.saves if each > start)])
                size = next_chunk(end - start, self._most_in_chunk(entry))
            chunk = tuple(entry.tokens[start : start + size])
            entry.computed += len(chunk)
            self.work += Work(prompt_tokens=len(chunk))
            self._shares.give(entry.who, len(chunk))
            if entry.computed in entry.saves:
                self._save(entry)
            if len(chunk) < SHORTEST_STEP and not is_single:
                entry.singly = joined(entry.singly, (start, entry.computed))
            if entry.computed < entry.prompt_tokens:
                self._turns.append(entry.request)
            ends = entry.computed == len(entry.tokens)
            part = StepEntry(
                request=entry.request,
                position=start,
                tokens=chunk,
                logit_rows=len(chunk) if entry.rows in {"logits", "states"} else int(ends),
            )
            if entry.rows is not None:
                is_state = entry.rows != "logits" and part.logit_rows > 0
                return Step(entries=(part,), states=is_state)
            if is_single:
                return Step(entries=(part,), singly=True)
            return Step(entries=(part,), run=self._run([entry]) if ends else 1)
        return None

    def _next_turn(self) -> str:
        """Whose prompt is read on."""
        turns = [self._active.get(name) for name in self._turns]
        firsts = {entry.who: entry.request for entry in reversed(turns) if entry is not None}
        name = self._turns[0]
        if len(firsts) > 1:
            order = dict.fromkeys(entry.who for entry in turns if entry is not None)
            name = firsts[self._shares.first(order)]
        self._turns.remove(name)
        return name

    def _most_in_chunk(self, entry: _Entry) -> int:
        """As many as there may be, unless somebody who reads an answer would wait for it."""
        most = self._chunk_tokens
        if entry.rows is not None:
            most = min(most, self._row_chunk_tokens[entry.rows])
        answering = [each.who for each in self._active.values() if each.is_answering]
        if not answering or not self._rows_agree:
            return most
        waiting = (self._active.get(name) for name in self._turns)
        reading = [entry.who, *(each.who for each in waiting if each is not None)]
        times = time_of_prompts(reading, answering)
        return self._pacing.chunk_tokens(most, answers=len(answering), times=times)

    def _repeat(self) -> Step | None:
        """Parts of answers that another plan has computed before, in steps like there."""
        entries = self._repeats
        if not entries:
            return None
        if not self._batches_agree:  # most answers are computed alone
            del entries[1:]
        most = min(REPEATED_TOKENS, self._chunk_tokens, MAX_CHUNK_TOKENS // len(entries))
        count = min(most, *(entry.to_repeat for entry in entries))
        parts = []
        for entry in entries:
            start = entry.computed
            entry.computed += count
            tokens = tuple(entry.tokens[start : entry.computed])
            parts.append(
                StepEntry(request=entry.request, position=start, tokens=tokens, logit_rows=0)
            )
        return Step(entries=tuple(parts), singly=True)

    def _run(self, entries: Sequence[_Entry]) -> int:
        """How far these may go on by themselves: while there is nothing else to do."""
        if len(entries) < self._residency.num_inside or self._residency.awaits_room:
            return 1
        if any(entry.is_led for entry in entries):
            return 1
        return min(  # the last token is not computed
            min(entry.memory.room + 1, entry.memory.longest) - len(entry.tokens)
            for entry in entries
        )
