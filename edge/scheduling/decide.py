"""The scheduler: what the peers are to do next. Pure: knows no peers, text or time.

Whose keys and values are in memory is `residency.py`'s to decide, and from whose a prompt goes
on `prefix_reuse.py`'s; of those in memory, three rules.
Requests that each wait for one token go together, because a batch reads the weights once for all of
them. Prompts come in chunks, turn by turn with those batches, and while there are some in chunks
that take no longer (`pacing.py`), so that a long prompt does not hold up other replies. And only as
many steps are under way as keep every stage busy: what is handed out cannot be reordered any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

from edge.offload.kv.slot_order import SlotOrder
from edge.protocol.step import (
    MAX_CHUNK_TOKENS,
    SHORTEST_STEP,
    FinishReason,
    Rows,
    Step,
    StepEntry,
)
from edge.scheduling.fairness import ANSWER_WEIGHT, ANYBODY, Who
from edge.scheduling.orders import Match, Orders
from edge.scheduling.pacing import Pacing, time_of_prompts
from edge.scheduling.prefix_reuse import NOTHING_LEFT, Reuse
from edge.scheduling.prefixes import PrefixCacheIndex, Spans, cut, joined, next_chunk
from edge.scheduling.residency import Member, Residency
from edge.scheduling.saved_states import SavedStates
from edge.scheduling.state import ScheduledRequest
from edge.scheduling.work import Work

REPEATED_TOKENS = 32
"""Tokens of an answer in one step: a request that comes meanwhile waits no longer than for that."""


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
        prefixes: PrefixCacheIndex | None = None,
        saved: SavedStates | None = None,
    ) -> None:
        """`stages` steps decode at once, of the requests that are in memory. logit_chunk_tokens
        and state_chunk_tokens: the most of a step whose logits, or hidden states, all travel.

        prefixes: what requests leave in memory; None: nothing. asks_peers: they may have more,
        of earlier plans or on disk. saved: where layers have states, those that are saved.
        """
        self._rows_agree = self._batches_agree = False
        self._pacing = Pacing()
        self._last_s: float | None = None
        """When the last answer was given, to a step that the next one waited for."""
        self._chunk_tokens = chunk_tokens
        self._row_chunk_tokens: Mapping[Rows, int] = {
            "logits": logit_chunk_tokens,
            "states": state_chunk_tokens,
            "last state": chunk_tokens,
        }
        self._residency = residency
        self._shares = residency.shares
        self._stages = stages
        self._active: dict[str, ScheduledRequest] = {}
        self._turns: deque[str] = deque()
        """Requests with prompt left to compute."""
        self._under_way: deque[Step] = deque()
        self._wanted: deque[int] = deque()
        """How many tokens each of them gives."""
        self._decoded_last = False
        self._finished: list[str] = []
        self._come: list[str] = []
        """In memory, and their beginnings not looked for yet."""
        self._given_up: dict[str, str] = {}
        self._disk_full = ""
        self._slots = SlotOrder()
        """Where caches lie in a shard's pool once the orders so far are carried out. Of no
        consequence but for the copies that batches in this order save."""
        self.work = Work()
        self._reuse: Reuse | None = None
        """None: nothing is kept, and nobody goes on from another."""
        if prefixes is not None:
            self._reuse = Reuse(
                self._active,
                residency,
                prefixes,
                saved,
                chunk_tokens=chunk_tokens,
                asks_peers=asks_peers,
            )

    def rows_agree(self) -> None:
        """A row is the same however many others are in its step, as long as they are even: a prompt
        may be cut, and a beginning end, behind any two tokens."""
        self._rows_agree = True
        if self._reuse is not None:
            self._reuse.rows_agree()

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
        salt: str = "",
        rows: Rows = "logits",
    ) -> None:
        """Start a request for `new_tokens` tokens, or with 0 for `rows`.

        answer: tokens that follow the prompt and that another plan has chosen. restored: number of
        them that need not be computed, because their keys and values can be given; restores_prompt:
        those of the prompt, too. is_repeated: another plan has begun with it, and of its prompt it
        computed `singly` one at a time. is_led: what its next token may be is told with each step.
        who: asked, and how urgently. salt: of what it may find, and leaves. Raises ValueError for
        one that could never start.
        """
        most_restored = max(0, len(answer) - 1)
        if not prompt or new_tokens < 0 or not restores_prompt <= restored <= most_restored:
            raise ValueError("a request needs tokens")
        tokens = [*prompt, *answer]
        if request in self._active or (self._reuse is not None and request in self._reuse):
            raise ValueError("a request needs an id of its own")
        member = Member(request, len(tokens), len(tokens) + new_tokens, who)
        self._residency.join(member)
        self._shares.come(who)
        self._active[request] = ScheduledRequest(
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
            salt=salt,
        )

    def cancel(self, request: str) -> None:
        """Forget a request; steps under way still complete. Unknown ones are ignored."""
        gone = self._active.pop(request, None)
        if gone is None:
            return
        self._leave(gone, has_ended=False)

    def _leave(self, gone: ScheduledRequest, *, has_ended: bool) -> None:
        """has_ended: the peers have computed nothing behind its tokens, and will not."""
        self._shares.go(gone.who)
        if self._reuse is None or not self._reuse.leaves(gone, has_ended=has_ended):
            self._residency.leave(gone.memory)
            self._finished.append(gone.request)

    def decide(self) -> Orders:
        """What is to be done now. It counts as done: the next orders build on these."""
        yields = self._should_yield
        while (settled := self._residency.settle()).stuck is not None:
            self._give_up(settled.stuck, self._disk_full)
        self._come.extend(settled.came)
        left = NOTHING_LEFT if self._reuse is None else self._reuse.take()
        match = self._look_for_beginnings()
        crowded_out = () if self._reuse is None else self._reuse.crowded_out(match)
        orders = Orders(
            yields=yields,
            save=left.save,
            finish=(*self._finished, *left.finish),
            keep=left.keep,
            drop=(*left.drop, *crowded_out),
            give_up=dict(self._given_up),
            swap_out=settled.swap_out,
            reserve=settled.reserve,
            match=match,
            restore=self._restore(),
        )
        self._finished.clear()
        self._given_up.clear()
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
        entry.computed = 0 if self._reuse is None else self._reuse.matched(entry, tokens)
        if not entry.is_repeated:
            entry.singly = cut(entry.singly, entry.computed)
        self._start(entry)
        return entry.computed

    def made_singly(self, request: str) -> Spans:
        """Those of the prompt's tokens that were found and had been computed one at a time."""
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
    def _repeats(self) -> list[ScheduledRequest]:
        """Requests with parts of an answer that another plan has computed before."""
        return [
            entry for entry in self._active.values() if entry.to_repeat and entry.memory.can_step
        ]

    def _start(self, entry: ScheduledRequest) -> None:
        entry.state = "going"
        if self._reuse is not None:
            self._reuse.plan_saves(entry)
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
            if self._reuse is None or entry.rows is not None or entry.restores_prompt:
                self._start(entry)
            elif self._reuse.awaits_another(entry):
                waiting.append(name)
            elif (match := self._reuse.match(entry)) is not None:
                entry.state, entry.asked = "matching", match.tokens
                if not entry.is_repeated:
                    entry.singly = match.singly
                matches[name] = match
            else:
                self._start(entry)
        self._come = waiting
        return matches

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
            if self._reuse is not None:
                self._reuse.computed(entry)
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

    def _most_in_chunk(self, entry: ScheduledRequest) -> int:
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

    def _run(self, entries: Sequence[ScheduledRequest]) -> int:
        """How far these may go on by themselves: while there is nothing else to do."""
        if len(entries) < self._residency.num_inside or self._residency.awaits_room:
            return 1
        if any(entry.is_led for entry in entries):
            return 1
        return min(  # the last token is not computed
            min(entry.memory.room + 1, entry.memory.longest) - len(entry.tokens)
            for entry in entries
        )
