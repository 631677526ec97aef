"""`decide`: the only entrance of scheduling. Pure: events in, orders out; no peers, text or time.

`residency.py` says which requests have keys and values in memory, `prefix_reuse.py` which prefix
cache a prompt goes on from, `fairness.py` whose turn it is, and `next_step.py` what is computed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from edge.protocol.step import SHORTEST_STEP, Step
from edge.scheduling.events import (
    Answered,
    Cancelled,
    DiskReserved,
    Event,
    Guessed,
    PrefixFound,
    PrefixMoved,
    Submitted,
    SwapOutDone,
)
from edge.scheduling.fairness import ANSWER_WEIGHT
from edge.scheduling.next_step import next_step, take_chunk
from edge.scheduling.orders import FoundPrefix, Match, Orders, Work
from edge.scheduling.prefix_reuse import NOTHING_LEFT
from edge.scheduling.prefixes import cut, joined
from edge.scheduling.request_state import RequestState
from edge.scheduling.resident import Resident
from edge.scheduling.state import SchedulingState, StepUnderWay


def decide(state: SchedulingState, events: Iterable[Event] = ()) -> Orders:
    """What is to be done after these events, in their order.

    The orders count as carried out: the next ones build on them. Call it again, without events,
    until there is no step. Raises ValueError for events that contradict the orders so far.
    """
    state.newest_answer_s = None
    for event in events:
        _apply(state, event)
    yields = state.should_yield
    while (settled := state.residency.settle()).stuck is not None:
        _give_up(state, settled.stuck, state.disk_full)
    state.come.extend(settled.came)
    left = NOTHING_LEFT if state.reuse is None else state.reuse.take()
    match = _look_up_prefixes(state)
    evicted = () if state.reuse is None else state.reuse.evict(match)
    orders = Orders(
        refuse=dict(state.refused),
        found=dict(state.found),
        yields=yields,
        save=left.save,
        finish=(*state.finished, *left.finish),
        keep=left.keep,
        drop=(*left.drop, *evicted),
        give_up=dict(state.given_up),
        swap_out=settled.swap_out,
        reserve=settled.reserve,
        match=match,
        restore=_restore(state),
    )
    for told in (state.finished, state.refused, state.given_up, state.found):
        told.clear()
    _arrange_slots(state, orders)
    # States that it saves, and the places they take, come with the next orders, behind it.
    under_way = next_step(state)
    if under_way is None:
        return orders
    return replace(orders, step=under_way.step, step_tokens=under_way.tokens)


def _apply(state: SchedulingState, event: Event) -> None:
    match event:
        case Submitted():
            _submit(state, event)
        case Cancelled(request=request):
            if (gone := state.active.pop(request, None)) is not None:
                _release(state, gone, has_ended=False)
        case Answered():
            _answered(state, event)
        case Guessed(request=request):
            if (entry := state.active.get(request)) is not None:
                entry.guesses, entry.was_guessed = event.tokens, event.was_guessed
                entry.in_turn = int(bool(event.tokens))  # what a grammar forces is right
        case PrefixFound():
            _prefix_found(state, event)
        case PrefixMoved(request=request):
            if (entry := state.active.get(request)) is not None:
                _look_again(state, entry)
        case DiskReserved(request=request, why_not=why_not):
            if (entry := state.active.get(request)) is None:
                return  # cancelled meanwhile
            if why_not is None:
                state.residency.reserved(entry.memory)
            else:
                _give_up(state, request, why_not)
        case SwapOutDone(request=request, why_not=why_not):
            state.disk_full = why_not or state.disk_full
            if (entry := state.active.get(request)) is not None:  # else cancelled meanwhile
                state.residency.swapped_out(entry.memory, moved=why_not is None)


def _submit(state: SchedulingState, new: Submitted) -> None:
    most_restored = max(0, len(new.answer) - 1)
    if (
        not new.prompt
        or new.new_tokens < 0
        or not new.restores_prompt <= new.restored <= most_restored
    ):
        raise ValueError("a request needs tokens")
    name = new.request
    if name in state.active:
        raise ValueError("a request needs an id of its own")
    if state.reuse is not None and name in state.reuse:
        state.refused[name] = "a request needs an id of its own"
        return
    tokens = [*new.prompt, *new.answer]
    resident = Resident(name, len(tokens), len(tokens) + new.new_tokens, new.who)
    try:
        state.residency.join(resident)
    except ValueError as error:
        state.refused[name] = str(error)
        return
    state.refused.pop(name, None)  # it was of a cancelled request with this id
    state.shares.come(new.who)
    state.active[name] = RequestState(
        name,
        tokens,
        resident,
        len(new.prompt),
        rows=None if new.new_tokens else new.rows,
        singly=cut(new.singly, max(0, len(new.prompt) - SHORTEST_STEP)),
        is_repeated=new.is_repeated,
        restored=new.restored,
        restores_prompt=new.restores_prompt,
        is_led=new.is_led,
        who=new.who,
        salt=new.salt,
        speculate=new.speculate,
        together=new.together,
        pairs=new.pairs,
        pictures=new.pictures,
    )


def _release(state: SchedulingState, gone: RequestState, *, has_ended: bool) -> None:
    """Free the memory of a request that is over, unless its cache is kept. has_ended: it ended with
    its last token, so no peer computes tokens after it."""
    gone.computed -= gone.behind
    gone.behind = 0
    state.shares.go(gone.who)
    if state.reuse is None or not state.reuse.leaves(gone, has_ended=has_ended):
        state.residency.leave(gone.memory)
        state.finished.append(gone.request)


def _give_up(state: SchedulingState, request: str, why: str) -> None:
    _release(state, state.active.pop(request), has_ended=False)
    state.given_up[request] = why


def _answered(state: SchedulingState, answered: Answered) -> None:
    if not state.under_way:
        raise ValueError("peers answered a step, but none is under way")
    under_way = state.under_way[0]
    step, tokens, last = under_way.step, answered.tokens, answered.last
    if len(tokens) != under_way.tokens and not (answered.drafted and tokens):
        raise ValueError(f"{len(tokens)} tokens for a step that gives {under_way.tokens}")
    if answered.at_s is not None:
        _observe(state, under_way, answered.at_s)
    state.newest_answer_s = answered.at_s
    under_way.answers += 1
    if last:
        state.under_way.popleft()
    state.last_answer_s = answered.at_s if state.under_way else None
    state.work += Work(
        answer_tokens=len(tokens),
        steps=int(not last),
        drafted_tokens=answered.drafted,
        accepted_tokens=len(tokens) - 1 if answered.drafted else 0,
        draft_steps=int(answered.drafted > 0),
    )
    if (entry := state.active.get(step.entries[0].request)) is not None and state.limits.rewinds:
        is_right = len(tokens) > answered.drafted
        entry.behind = 0 if is_right else entry.behind + len(tokens)
    parts = step.entries * len(tokens) if answered.drafted else step.entries
    for part, token, end in zip(parts, tokens, answered.ends, strict=False):
        entry = state.active.get(part.request)
        if entry is None:
            continue  # cancelled meanwhile
        if answered.together:
            entry.together = joined(entry.together, (len(entry.tokens) - 1, len(entry.tokens)))
        entry.tokens.append(token)
        entry.guesses, entry.in_turn = (), 0
        entry.was_guessed, entry.pairs = False, answered.pairs
        state.shares.give(entry.who, ANSWER_WEIGHT)
        entry.memory.length += 1
        entry.computed = len(entry.tokens) - 1
        if end is not None:
            _release(state, state.active.pop(part.request), has_ended=True)
        elif entry.memory.length == entry.memory.longest:
            raise ValueError("a request goes on after its last token")
    for part, guesses in zip(step.entries, answered.guesses, strict=False):
        entry = state.active.get(part.request)
        if guesses.tokens and entry is not None and not entry.is_led:
            entry.guesses, entry.in_turn = guesses.tokens, guesses.in_turn
            entry.pairs = True
    if step.rest and not last:
        _go_on_reading(state, step)
    if last:
        _end_step(state, step)


def _go_on_reading(state: SchedulingState, step: Step) -> None:
    """The next step of a run takes the next chunk of its prompt."""
    chunk = step.entries[-1]
    if (entry := state.active.get(chunk.request)) is not None:
        take_chunk(state, entry, len(chunk.tokens))


def _end_step(state: SchedulingState, step: Step) -> None:
    reading = state.active.get(step.entries[-1].request) if step.rest else None
    if reading is not None:
        state.turns.appendleft(reading.request)
    for part in step.entries:
        entry = state.active.get(part.request)
        if entry is not None:
            entry.memory.steps_out -= 1
            if entry.rows is not None and part.end == len(entry.tokens):
                _release(state, state.active.pop(part.request), has_ended=False)


def _observe(state: SchedulingState, under_way: StepUnderWay, at_s: float) -> None:
    """Tell the pacing how long a step took, of which an answer came at this time of a peer's
    clock. An answer's next token waits for the way to here and back as well, unless another step
    was under way."""
    step, last_s = under_way.step, state.last_answer_s
    decodes = not step.is_mixed and (step.is_decode or under_way.answers)
    begun_s = max((each for each in (last_s, under_way.since_s) if each is not None), default=at_s)
    if at_s <= begun_s or step.singly:
        return
    if step.is_mixed:
        state.mixed_pacing.read(len(step.entries[-1].tokens), at_s - begun_s)
    elif not decodes:
        state.pacing.read(step.num_tokens, at_s - begun_s)
    elif step.logit_rows:
        state.mixed_pacing.decoded(at_s - begun_s, answers=step.batch)
        if last_s is not None:
            state.pacing.decoded(at_s - last_s)


def _prefix_found(state: SchedulingState, found: PrefixFound) -> None:
    entry = state.active.get(found.request)
    if entry is None:
        return  # cancelled meanwhile
    if not 0 <= found.tokens <= most_found(entry.prompt_tokens):
        raise ValueError(
            f"a prefix of {found.tokens} tokens found for a prompt of {entry.prompt_tokens}"
        )
    point = 0 if state.reuse is None or entry.asked else state.reuse.point(found.points)
    if point > entry.point:
        entry.point = point
        _look_again(state, entry)
        return
    entry.computed = 0 if state.reuse is None else state.reuse.matched(entry, found.tokens)
    if not entry.is_repeated:
        entry.singly = cut(entry.singly, entry.computed)
    state.found[found.request] = FoundPrefix(tokens=entry.computed, singly=entry.singly)
    _start(state, entry)


def _look_again(state: SchedulingState, entry: RequestState) -> None:
    """Have the peers look up a prefix once more."""
    entry.state = "coming"
    state.come.append(entry.request)


def most_found(prompt_tokens: int) -> int:
    """Most tokens of a prompt that a prefix cache may have: some must be computed."""
    return max(0, prompt_tokens - SHORTEST_STEP)


def _start(state: SchedulingState, entry: RequestState) -> None:
    entry.state = "going"
    if state.reuse is not None:
        state.reuse.plan_saves(entry)
    if entry.restores_prompt:
        entry.computed = entry.prompt_tokens
        return
    state.turns.append(entry.request)


def _look_up_prefixes(state: SchedulingState) -> dict[str, Match]:
    """Start requests that came into memory, or have the peers look up their prefix first.

    A request whose prefix is being computed for another request waits for that.
    """
    matches: dict[str, Match] = {}
    waiting: list[str] = []
    for name in state.come:
        entry = state.active.get(name)
        if entry is None:
            continue  # cancelled meanwhile
        if state.reuse is None or entry.rows is not None or entry.restores_prompt:
            _start(state, entry)
        elif state.reuse.awaits_another(entry):
            waiting.append(name)
        elif (match := state.reuse.match(entry)) is not None:
            entry.state, entry.asked = "matching", match.tokens
            if not entry.is_repeated:
                entry.singly = match.singly
            matches[name] = match
        else:
            _start(state, entry)
    state.come = waiting
    return matches


def _restore(state: SchedulingState) -> dict[str, int]:
    """Answers whose prompts have been handed out, and which are restored now."""
    given: dict[str, int] = {}
    for entry in state.repeats:
        if entry.restored:
            given[entry.request] = entry.restored
            entry.computed += entry.restored
            entry.restored = 0
    return given


def _arrange_slots(state: SchedulingState, orders: Orders) -> None:
    """Follow what these orders, before their step, do to the slots of a shard's pool."""
    slots = state.slots
    for name in (*orders.finish, *orders.drop, *orders.swap_out):
        slots.release(name)
    for name, match in orders.match.items():
        if match.source is None:
            continue
        if match.moves and match.source in slots:
            slots.rename(match.source, name)
        else:
            slots.open(name)
    for name in orders.restore:
        slots.open(name)
