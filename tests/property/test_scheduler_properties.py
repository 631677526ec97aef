"""Whatever comes and goes: every token is computed once, in order, and everybody is served."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from edge.protocol.step import FinishReason, Step
from edge.scheduling.fairness import PRIORITIES, Who
from edge.scheduling.orders import Match, Orders
from edge.scheduling.prefixes import PrefixCacheIndex
from edge.scheduling.residency import Residency
from edge.scheduling.saved_states import SavedStates
from tests.support.scheduling import Steps


@dataclass(slots=True)
class Asked:
    """A request as its user knows it."""

    tokens: list[int]
    """The prompt, and what was sampled."""
    new_tokens: int
    longest: int
    prompt_tokens: int
    """What follows is answer, also what another plan has computed of it."""
    singly: set[int] = field(default_factory=set)
    """Tokens that were computed one at a time, or are to be, as another plan has."""
    together: set[int] = field(default_factory=set)
    """The same of tokens of the answer in steps with guesses."""
    is_repeated: bool = False
    salt: str = ""
    computed: int = 0
    guesses: int = 0
    """Tokens behind those, until they turn out to be wrong."""
    sampled: int = 0
    is_cancelled: bool = False

    @property
    def is_done(self) -> bool:
        if self.is_cancelled:
            return True
        if self.new_tokens:
            return self.sampled == self.new_tokens
        return self.computed == len(self.tokens)


@dataclass(slots=True)
class Peers:
    """The other side: takes steps in order, samples the numbers 1000, 1001, …"""

    scheduler: Steps
    capacity: int
    most_requests: int
    stages: int
    disk: int = 0
    known: int = 0
    """Tokens of every prompt that need not be computed, where peers are asked."""
    away: set[str] = field(default_factory=set)
    """Whose caches are on disk."""
    leaving: deque[str] = field(default_factory=deque)
    reserving: deque[tuple[str, int]] = field(default_factory=deque)
    reserved: dict[str, int] = field(default_factory=dict)
    """Tokens of requests for which the disk has room."""
    matching: deque[tuple[str, Match]] = field(default_factory=deque)
    told: dict[str, tuple[Match, int]] = field(default_factory=dict)
    """Matches whose outcome scheduling was told, and how many tokens the peers have."""
    most_kept: int = 0
    is_strict: bool = False
    places: int = 0
    """For states, where layers have some."""
    saved: dict[int, tuple[str, list[int]]] = field(default_factory=dict)
    """Whose state lies there, and of which tokens."""
    kept: dict[str, list[int]] = field(default_factory=dict)
    """Of requests that are over: the tokens whose rows are in memory."""
    finished: set[str] = field(default_factory=set)
    asked: dict[str, Asked] = field(default_factory=dict)
    started: set[str] = field(default_factory=set)
    out: deque[Step] = field(default_factory=deque)
    next_token: int = 1000
    gave_up: int = 0
    must_yield: bool = False
    drafts: int = 0
    now_s: float = 0.0
    chunk_tokens: int = 0
    shared: int = 0
    """Chunks beside tokens of answers."""

    def add(self, prompt: int, new_tokens: int) -> None:
        """Every other one goes on from the last answer that there is, and some from their own, of
        which another plan has computed a part."""
        name = f"r{len(self.asked)}"
        tokens = list(range(prompt))
        if prompt % 2 and new_tokens:
            answered = [a.tokens for a in self.asked.values() if a.is_done and a.sampled]
            if answered and len(answered[-1]) + prompt + new_tokens <= 38:
                tokens = answered[-1] + tokens
        known = min(prompt // 3, len(tokens) - 1) if new_tokens % 3 else 0
        count = len(tokens) - known
        first, last = prompt // 4, min(prompt // 2, count - 2)
        spans = ((first, last),) if known and first < last and not self.is_strict else ()
        most = len(tokens) - 1
        together = (
            ((count + known // 3, most),) if self.drafts and count + known // 3 < most else ()
        )
        self.asked[name] = Asked(
            tokens,
            new_tokens,
            len(tokens) + new_tokens,
            count,
            singly={each for span in spans for each in range(*span)},
            together={each for span in together for each in range(*span)},
            is_repeated=known > 0,
            salt="" if prompt % 5 else "own",
        )
        self.scheduler.add(
            name,
            tokens[:count],
            answer=tokens[count:],
            new_tokens=new_tokens,
            singly=spans,
            who=Who("abc"[prompt % 3], PRIORITIES[new_tokens % 3]),
            salt=self.asked[name].salt,
            speculate=("off", "auto", "lookup")[prompt % 3],
            together=together,
        )

    def cancel(self, index: int) -> None:
        names = [name for name, asked in self.asked.items() if not asked.is_done]
        if names:
            name = names[index % len(names)]
            self.asked[name].is_cancelled = True
            self.scheduler.cancel(name)

    def move(self, *, has_room: bool = True) -> None:
        """The first of those to be swapped out has left, or the disk has no room for it."""
        name = self.leaving.popleft()
        if has_room and not self.asked[name].is_done:
            self.away.add(name)
        self.scheduler.swapped_out(name, why_not=None if has_room else "full")

    def reserve(self, *, has_room: bool = True) -> None:
        """The first of those for which the disk must have room has it, or must give up."""
        name, tokens = self.reserving.popleft()
        if has_room:
            self.reserved[name] = tokens
        self.scheduler.reserved(name, why_not=None if has_room else "full")

    def match(self, *, has_room: bool = True) -> None:
        """Peers have a part of the first of the prompts that they were asked about; or one of them
        has no room for it, where that has a state."""
        name, match = self.matching.popleft()
        asked = self.asked[name]
        assert asked.computed == 0
        known = max(0, min(self.known, asked.prompt_tokens - 2), match.tokens)
        if self.places and not has_room:
            known = 0
        self.scheduler.matched(name, known)
        self.told[name] = match, known

    def take_found(self, name: str, used: int) -> None:
        """Scheduling says how many of the tokens that the peers have are not computed."""
        match, known = self.told.pop(name)
        asked = self.asked[name]
        assert not asked.is_done
        assert min(match.tokens, known) <= used <= known
        found = {each for span in match.singly for each in range(*span) if each < used}
        if not asked.is_repeated:
            asked.singly = found
        elif match.source:
            assert found == {each for each in asked.singly if each < used}
        assert not self.is_strict or not found
        asked.computed = used
        self.started.add(name)

    def check_memory(self) -> None:
        """No more is kept than there is room for, but for one request that is there alone."""
        kept = [
            asked.computed + asked.guesses
            for name, asked in self.asked.items()
            if name in self.started and name not in self.away and not asked.is_done
        ]
        kept += [len(tokens) for tokens in self.kept.values()]
        assert sum(kept) <= self.capacity or len([each for each in kept if each]) == 1
        assert len(self.kept) <= self.most_kept
        on_disk = sum(self.asked[n].computed for n in self.away if not self.asked[n].is_done)
        assert on_disk <= self.disk

    def follow_orders(self) -> None:
        while True:
            orders = self.scheduler.decide()
            for name, prefix in orders.found.items():
                self.take_found(name, prefix.tokens)
            assert not orders.yields or self.out[-1].run > 1
            self.must_yield |= orders.yields
            for name, why in orders.give_up.items():
                assert why == "full"
                assert not self.asked[name].is_done
                self.gave_up += 1
                self.asked[name].is_cancelled = True
            for save in orders.save:
                asked = self.asked[save.request]
                assert asked.computed == save.tokens >= 1
                assert save.place < self.places
                self.saved[save.place] = save.request, asked.tokens[: save.tokens]
            for name in orders.finish:
                assert self.asked[name].is_done
                assert name not in self.finished, "each is told once"
                self.finished.add(name)
            for name, left in orders.keep.items():
                assert self.asked[name].is_done
                assert name not in self.finished, "each is told once"
                self.finished.add(name)
                asked = self.asked[name]
                assert left.tokens <= asked.computed
                assert list(left.answer) == asked.tokens[asked.prompt_tokens : left.tokens]
                assert not self.is_strict or not asked.singly & set(range(left.tokens))
                self.kept[name] = asked.tokens[: left.tokens]
                assert not self.places or (name, self.kept[name]) in self.saved.values()
            for name in orders.drop:
                del self.kept[name]
            for name in (*orders.finish, *orders.drop):
                self.saved = {p: each for p, each in self.saved.items() if each[0] != name}
            for name in orders.swap_out:
                assert all(name not in [e.request for e in each.entries] for each in self.out)
                self.leaving.append(name)
            for name, tokens in orders.reserve.items():
                assert self.capacity < tokens <= self.disk
                self.reserving.append((name, tokens))
            for name, match in orders.match.items():
                asked = self.asked[name]
                assert list(match.prompt) == asked.tokens[: asked.prompt_tokens]
                assert match.salt == self.asked[name].salt
                if match.source:
                    assert self.asked[match.source].salt == match.salt
                    begins = self.rows_of(match.source)
                    assert len(begins) >= match.tokens > 0, "what is there"
                    assert list(match.prompt[: match.tokens]) == begins[: match.tokens]
                    assert len(match.prompt) - match.tokens >= 2
                    told = {each for span in match.singly for each in range(*span)}
                    singly = self.asked[match.source].singly
                    assert told == {each for each in singly if each < match.tokens}
                    begun = list(match.prompt[: match.tokens])
                    assert not self.places or (match.source, begun) in self.saved.values()
                if match.moves and match.source:
                    del self.kept[match.source]
                    self.saved = {
                        place: (name if whose == match.source else whose, tokens)
                        for place, (whose, tokens) in self.saved.items()
                        if whose != match.source or len(tokens) <= match.tokens
                    }
                self.matching.append((name, match))
            concerned = {*orders.swap_out, *orders.reserve}
            assert not concerned & self.finished
            step = orders.step
            if step is None:
                break
            self.out.append(step)
            self.away -= {entry.request for entry in step.entries}
            waiting = {
                *self.leaving,
                *(n for n, _ in self.matching),
                *(n for n, _ in self.reserving),
            }
            assert not {entry.request for entry in step.entries} & waiting
            assert len(self.out) <= self.stages + 1
            for entry in step.entries:
                asked = self.asked[entry.request]
                assert not asked.is_done, "nobody wants it"
                assert entry.position == asked.computed
                extra = step.spare + step.drafted
                end = entry.end - extra
                computed = list(entry.tokens[: len(entry.tokens) - extra])
                assert computed == asked.tokens[asked.computed : end]
                now = set(range(entry.position, end))
                if asked.computed < asked.prompt_tokens:
                    assert entry.end <= asked.prompt_tokens
                    assert now <= asked.singly if step.singly else not now & asked.singly
                    if len(now) == 1:
                        asked.singly |= now
                elif step.drafted:
                    asked.together |= now
                elif step.singly or len(entry.tokens) == 1:
                    assert not now & asked.together
                    asked.singly |= now
                else:
                    assert now <= asked.together, "an answer, token by token"
                    assert len(entry.tokens) % 2 == 0
                asked.computed = end
                most = max(end + step.run - 1 + (step.drafts > 0), entry.end)
                if step.is_mixed and entry is step.entries[-1]:
                    self.shared += 1
                    assert step.rows <= self.chunk_tokens
                    most = end + len(step.rest)
                    assert most <= asked.prompt_tokens - 2 * bool(step.rest)
                assert not step.drafts or asked.longest <= self.capacity
                assert most <= max(self.capacity, self.reserved.get(entry.request, 0))
                self.started.add(entry.request)
                at_end = end == len(asked.tokens)
                wanted = len(entry.tokens) if not asked.new_tokens else int(at_end)
                assert entry.logit_rows == wanted + step.drafted
            alive = [self.asked[n] for n in self.started if not self.asked[n].is_done]
            assert len(alive) <= self.most_requests
            assert sum(asked.longest for asked in alive) <= max(self.capacity, self.disk)
            self.check_memory()

    def rows_of(self, request: str) -> list[int]:
        """The tokens that a request's cache has rows of."""
        if request in self.kept:
            return self.kept[request]
        return self.asked[request].tokens[: self.asked[request].computed]

    def answer(self, run: int) -> None:
        """Complete the oldest step, or a part of its run of at most `run` tokens."""
        step = self.out[0]
        wanting = [
            self.asked[entry.request]
            for entry in step.entries
            if entry.logit_rows and self.asked[entry.request].new_tokens
        ]
        left, is_first, chunks = step.run, True, step
        while True:
            drafted = step.drafted if is_first else min(step.drafts, self.next_token % 5)
            count = 1
            if drafted:
                wanting[0].guesses = drafted + (not is_first)
                self.check_memory()
                wanting[0].guesses = 0
                right = min(drafted, self.next_token % 3)
                count = min(1 + right, left, wanting[0].new_tokens - wanting[0].sampled)
            left -= count
            last = step.run - left >= min(step.run, run) or self.must_yield
            tokens = list(range(self.next_token, self.next_token + len(wanting) * count))
            self.next_token += len(tokens)
            ends: list[FinishReason | None] = []
            for asked, token in zip(wanting * count, tokens, strict=True):
                if not is_first:
                    (asked.together if drafted else asked.singly).add(asked.computed)
                    asked.computed += 1
                is_first = is_first and count == 1
                asked.tokens.append(token)
                asked.sampled += 1
                ends.append("length" if asked.sampled == asked.new_tokens else None)
            is_first = False
            self.check_memory()
            ended = any(asked.is_done for asked in wanting)
            self.now_s += 1.0
            self.scheduler.answer(
                tokens, ends=ends, last=last or ended, drafted=drafted, at_s=self.now_s
            )
            if step.rest and not (last or ended):
                chunks = chunks.following(tokens)
                entry = chunks.entries[-1]
                reading = self.asked[entry.request]
                assert entry.position == reading.computed
                assert entry.tokens == tuple(reading.tokens[entry.position : entry.end])
                reading.computed = entry.end
            if last or ended:
                self.out.popleft()
                self.must_yield = False
                break
            self.follow_orders()


EVENT = st.one_of(
    st.tuples(st.just("add"), st.integers(1, 30), st.integers(0, 8)),
    st.tuples(st.just("cancel"), st.integers(0, 50), st.just(0)),
    st.tuples(st.just("answer"), st.integers(1, 9), st.just(0)),
    st.tuples(st.just("move"), st.just(0), st.just(0)),
    st.tuples(st.just("reserve"), st.just(0), st.just(0)),
    st.tuples(st.just("match"), st.integers(0, 3), st.just(0)),
)


def everything_is_computed_once_and_in_order(
    events: list[tuple[str, int, int]],
    chunk: int,
    logit_chunk: int,
    capacity: int,
    requests: int,
    stages: int,
    disk: int,
    turn: int,
    small_memory: int | None,
    full_after: int | None,
    known: int,
    page: int,
    most_kept: int,
    rows_agree: bool,
    fewest: int,
    is_strict: bool,
    places: int = 0,
    drafts: int = 0,
    mixes: bool = False,
) -> int:
    """The number of chunks beside tokens of answers."""
    drafts = drafts if rows_agree and not is_strict and not places and chunk > 1 else 0
    if disk >= 38 and small_memory is not None:
        capacity = small_memory
    residency = Residency(
        memory_tokens=capacity,
        disk_tokens=disk,
        longest_tokens=1000,
        requests=requests,
        quantum_tokens=turn,
        held=lambda tokens: -(-tokens // page) * page,
        most_kept=most_kept,
    )
    saved = SavedStates(places, apart_tokens=fewest, part_tokens=9) if places else None
    scheduler = Steps(
        residency,
        chunk_tokens=chunk,
        logit_chunk_tokens=logit_chunk,
        stages=stages,
        prefixes=(
            PrefixCacheIndex(
                chunk_tokens=chunk,
                fewest_tokens=fewest,
                is_strict=is_strict,
                last_saved=None if saved is None else saved.last,
            )
            if chunk > 1
            else None
        ),
        saved=saved,
        rows_agree=rows_agree,
        batches_agree=rows_agree,
        drafts=drafts,
        mixes=mixes,
        memory_tokens=capacity,
    )
    peers = Peers(
        scheduler, capacity, requests, stages, disk, 0 if places else known, drafts=drafts
    )
    peers.most_kept, peers.is_strict, peers.places = most_kept, is_strict, places
    peers.chunk_tokens = chunk
    moves = 0

    def has_room() -> bool:
        nonlocal moves
        moves += 1
        return full_after is None or moves <= full_after

    for what, first, second in events:
        if what == "add":
            peers.add(first, second)
        elif what == "cancel":
            peers.cancel(first)
        elif what == "move":
            if peers.leaving:
                peers.move(has_room=has_room())
        elif what == "reserve":
            if peers.reserving:
                peers.reserve(has_room=has_room())
        elif what == "match":
            if peers.matching:
                peers.match(has_room=first > 0)
        elif peers.out:
            peers.answer(first)
        peers.follow_orders()
    while peers.out or peers.leaving or peers.reserving or peers.matching:
        if peers.matching:
            peers.match()
        if peers.leaving:
            peers.move(has_room=has_room())
        if peers.reserving:
            peers.reserve(has_room=has_room())
        if peers.out:
            peers.answer(run=5)
        peers.follow_orders()
    assert all(asked.is_done for asked in peers.asked.values())
    assert full_after is not None or not peers.gave_up
    assert peers.finished == set(peers.asked), "every shard has freed them all"
    assert scheduler.decide() == Orders()
    return peers.shared


@given(
    events=st.lists(EVENT, max_size=60),
    chunk=st.integers(1, 7),
    logit_chunk=st.integers(1, 7),
    capacity=st.integers(38, 120),
    requests=st.integers(1, 4),
    stages=st.integers(1, 4),
    disk=st.one_of(st.just(0), st.integers(20, 300)),
    turn=st.integers(1, 9),
    small_memory=st.one_of(st.none(), st.integers(8, 37)),
    full_after=st.one_of(st.none(), st.integers(0, 5)),
    known=st.integers(0, 20),
    page=st.sampled_from([1, 3, 16]),
    most_kept=st.integers(0, 3),
    rows_agree=st.booleans(),
    fewest=st.integers(1, 9),
    is_strict=st.booleans(),
    drafts=st.sampled_from([0, 1, 3]),
)
@settings(max_examples=120)
def test_everything_is_computed_once_and_in_order(**drawn: Any) -> None:
    """With a disk, also where one request has more than memory, or the disk is full some time."""
    everything_is_computed_once_and_in_order(**drawn)


@given(
    events=st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.sampled_from([4, 5, 7, 8, 23]), st.integers(3, 8)),
            st.tuples(st.just("answer"), st.integers(1, 9), st.just(0)),
            st.tuples(st.just("answer"), st.integers(1, 9), st.just(0)),
            st.tuples(st.just("answer"), st.just(9), st.just(0)),
            EVENT,
        ),
        min_size=20,
        max_size=60,
    ),
    chunk=st.sampled_from([2, 3, 4, 6]),
    capacity=st.integers(60, 120),
    requests=st.integers(1, 3),
    stages=st.integers(1, 3),
    disk=st.sampled_from([0, 300]),
    turn=st.integers(1, 9),
    small_memory=st.sampled_from([None, None, 20]),
    page=st.sampled_from([1, 3]),
    most_kept=st.integers(1, 4),
    drafts=st.sampled_from([1, 3]),
)
@settings(max_examples=150)
def test_answers_with_guesses_are_computed_again_in_the_same_steps(**drawn: Any) -> None:
    """And guesses have no more memory than the answer may grow to."""
    everything_is_computed_once_and_in_order(
        **drawn,
        logit_chunk=4,
        full_after=None,
        known=0,
        rows_agree=True,
        fewest=2,
        is_strict=False,
    )


@given(
    events=st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(1, 9), st.integers(1, 25)),
            st.tuples(st.just("add"), st.integers(20, 30), st.integers(1, 8)),
            st.tuples(st.just("answer"), st.integers(1, 9), st.just(0)),
            st.tuples(st.just("match"), st.just(3), st.just(0)),
            EVENT,
        ),
        min_size=20,
        max_size=60,
    ),
    chunk=st.integers(3, 9),
    capacity=st.integers(38, 120),
    requests=st.integers(2, 5),
    stages=st.integers(1, 3),
    disk=st.sampled_from([0, 300]),
    small_memory=st.sampled_from([None, 30]),
    most_kept=st.integers(0, 3),
    drafts=st.sampled_from([0, 3]),
)
@settings(max_examples=150)
def test_chunks_beside_answers_are_computed_once_and_in_order(**drawn: Any) -> None:
    """Also in runs, which end with an answer, or where others wait."""
    everything_is_computed_once_and_in_order(
        **drawn, logit_chunk=4, turn=4, full_after=None, known=0, page=1, rows_agree=True,
        fewest=2, is_strict=False, mixes=True,
    )  # fmt: skip


def test_chunks_of_a_long_prompt_are_beside_answers() -> None:
    """Two answers, and then a prompt of 30 tokens: in runs, if nothing else is to be done."""
    begun = [("add", 2, 30), ("add", 4, 30), *[("answer", 1, 0), ("match", 3, 0)] * 4]
    events = [*begun, ("add", 30, 1), ("match", 3, 0), *[("answer", 3, 0)] * 12]
    for stages in (1, 2):
        shared = everything_is_computed_once_and_in_order(
            events, 8, 4, 120, 4, stages, 0, 4, None, None, 0, 1, 0, True, 2, False, mixes=True
        )
        assert shared >= 2


@given(
    events=st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(8, 20), st.integers(1, 6)),
            st.tuples(st.just("answer"), st.just(9), st.just(0)),
            st.tuples(st.just("answer"), st.just(9), st.just(0)),
            EVENT,
        ),
        min_size=20,
        max_size=60,
    ),
    chunk=st.sampled_from([2, 4, 6]),
    requests=st.integers(1, 4),
    stages=st.integers(1, 2),
    disk=st.sampled_from([0, 300]),
    most_kept=st.integers(1, 4),
    rows_agree=st.booleans(),
    is_strict=st.booleans(),
    places=st.integers(1, 5),
)
@settings(max_examples=60)
def test_whoever_begins_with_a_state_finds_it(**drawn: Any) -> None:
    """It was saved behind just these tokens, and no other is in its place."""
    everything_is_computed_once_and_in_order(
        **drawn,
        logit_chunk=4,
        capacity=120,
        turn=4,
        small_memory=None,
        full_after=None,
        known=0,
        page=1,
        fewest=2,
    )
