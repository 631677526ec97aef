"""The next step of a run. Pure.

Requests that each wait for one token go together, because a batch reads the weights once for all
of them (continuous batching). Prompts are computed in chunks (chunked prefill): beside the answers'
tokens in one step where all shards can (stall-free batches, after Sarathi-Serve), else in turn with
them. While answers are under way the chunks are short (`pacing.py`), so that a long prompt does not
hold up other replies. Only as many steps are under way as keep every stage busy, because a step
that was handed out cannot be reordered.
"""

from __future__ import annotations

from collections.abc import Sequence

from edge.models.pictures import is_row
from edge.protocol.step import MAX_CHUNK_TOKENS, MOST_IN_TURN, SHORTEST_STEP, Step
from edge.scheduling.orders import Work
from edge.scheduling.pacing import time_of_prompts
from edge.scheduling.prefixes import Span, joined, next_chunk
from edge.scheduling.request_state import RequestState
from edge.scheduling.state import SchedulingState, StepUnderWay

MOST_SHARED = 16
"""Steps of a run with chunks of a prompt, whose size does not change in it."""
REPEATED_TOKENS = 32
"""Tokens of an answer that one step repeats: a request that comes meanwhile waits for no more."""


def next_step(state: SchedulingState) -> StepUnderWay | None:
    """The step to hand out now; it is under way from then on. None: there is none."""
    if len(state.under_way) > state.limits.stages:
        return None
    known = (_chunk, _repeat)
    # A chunk that answers share a step with keeps none of them waiting.
    chunk_first = state.decoded_last or (state.mixed_last and bool(_sharing(state)))
    order = (*known, _decode) if chunk_first else (_decode, *known)
    for choose in order:
        step = choose(state)
        if step is not None:
            state.decoded_last, state.mixed_last = choose is _decode, step.is_mixed
            return _hand_out(state, step)
    return None


def _hand_out(state: SchedulingState, step: Step) -> StepUnderWay:
    names = [part.request for part in step.entries]
    for name in names:
        state.slots.open(name)
    state.slots.gather(names)
    state.work += Work(steps=1)
    under_way = StepUnderWay(step, 0, since_s=state.newest_answer_s)
    for part in step.entries:
        entry = state.active[part.request]
        entry.memory.steps_out += 1
        under_way.tokens += part.logit_rows > 0 and entry.rows is None
    state.under_way.append(under_way)
    return under_way


def _decode(state: SchedulingState) -> Step | None:
    """One token of every request that waits for one. Alone, these run on by themselves."""
    decoding = _decoding(state)
    if len(decoding) >= state.limits.stages and not _are_in_turn(state, decoding):
        return None
    ready = _ready(state)
    if not ready:
        return None
    late = next((each for each in ready if each.behind), None)
    if late is not None:  # a step with others takes one token of each
        ready = [late]
    elif (first := _in_turn(state, ready)) is not None:
        first.turn = state.work.steps
        return _paired(state, first, min(1 + len(first.guesses), _most_drafted(state, first)))
    if len(decoding) >= state.limits.stages:
        return None
    run, drafts = _run(state, ready)
    is_alone = drafts > 0 and len(ready) == state.residency.num_inside == 1
    if is_alone or late is not None:
        return _paired(state, ready[0], run if is_alone else 1)
    return Step(
        entries=tuple(
            entry.part(entry.computed, (entry.tokens[-1],), logit_rows=1) for entry in ready
        ),
        run=run,
        drafts=drafts,
    )


def _decoding(state: SchedulingState) -> list[Step]:
    """The steps under way that compute tokens of answers."""
    steps = [each.step for each in state.under_way]
    return [step for step in steps if step.is_decode or step.is_mixed]


def _ready(state: SchedulingState) -> list[RequestState]:
    """The answers whose next token can be computed now, in the order of their caches."""
    are_ready = state.ready()
    return [are_ready[name] for name in state.slots.arranged(tuple(are_ready))]


def _sharing(state: SchedulingState) -> list[RequestState]:
    """The answers whose next token is computed beside a chunk of a prompt; none where they have
    steps of their own."""
    if not state.limits.mixes or len(_decoding(state)) >= state.limits.stages:
        return []
    ready = _ready(state)
    if any(each.behind for each in ready) or _in_turn(state, ready) is not None:
        return []
    return ready if state.mixed_pacing.knows(len(ready)) else []


def _in_turn(state: SchedulingState, ready: Sequence[RequestState]) -> RequestState | None:
    """The answer whose turn it is to have a step of its own, with a draft; None: those that are
    ready share a step, or one of them is alone and may run on.

    Answers are computed in turn if that is faster for each of them. An answer that has a stage to
    itself keeps no other waiting.
    """
    answering = [each for each in state.active.values() if each.is_answering or each.is_ready]
    if len(answering) == 1 == state.residency.num_inside or state.residency.awaits_room:
        return None
    share = max(1, -(-len(answering) // state.at_once))

    def gains(entry: RequestState) -> bool:
        return entry.in_turn >= share and _most_drafted(state, entry) > 1

    if share > 1 and (state.turns or not all(map(gains, answering))):
        return None
    return min(filter(gains, ready), key=lambda each: each.turn, default=None)


def _are_in_turn(state: SchedulingState, decoding: Sequence[Step]) -> bool:
    """Whether another answer's turn may wait at the devices for those under way, so that none
    idles meanwhile."""
    return len(decoding) == state.limits.stages == 1 and decoding[0].drafted > 0


def _paired(state: SchedulingState, entry: RequestState, run: int) -> Step:
    """The next token of an answer that may have drafts, and guesses if there are some. The last
    token stands for a guess where the number of rows must be even."""
    start = entry.computed - entry.behind
    tokens = tuple(entry.tokens[start:])
    goes_on = run > 1 + len(entry.guesses)
    most = min(run - 1, 1 + state.limits.drafts - len(tokens), len(entry.guesses))
    if state.limits.cut_end is not None:
        rows = state.limits.cut_end(start) - start
        most = min(most, rows // 2 * 2 - len(tokens))
    guesses = entry.guesses[: max(0, most)]
    if not goes_on:
        run = 1 + len(guesses)
    is_paired = entry.is_paired or entry.behind > 0
    has_room = entry.memory.room > len(entry.tokens) + len(guesses)
    if is_paired and has_room and (len(tokens) + len(guesses)) % 2:
        guesses += tokens[-1:]
    part = entry.part(start, (*tokens, *guesses), logit_rows=1 + len(guesses))
    return Step(entries=(part,), run=run, drafts=state.limits.drafts)


def _chunk(state: SchedulingState) -> Step | None:
    """The next chunk of the prompt whose turn it is, beside tokens of answers where these can share
    its step."""
    while state.turns:
        name = _next_turn(state)
        entry = state.active.get(name)
        sharing = [] if entry is None else _sharing_with(state, entry)
        if entry is not None and not sharing and _awaits_answers(state, entry):
            return None
        state.turns.remove(name)
        if entry is not None:  # else cancelled meanwhile
            return _chunk_of(state, entry, sharing)
    return None


def _chunk_of(state: SchedulingState, entry: RequestState, sharing: Sequence[RequestState]) -> Step:
    """sharing: answers whose next tokens are in its step."""
    start = entry.computed
    span = next((each for each in entry.singly if each[1] > start), None)
    is_single = span is not None and span[0] <= start
    if span is not None and is_single:
        size = min(span[1] - start, REPEATED_TOKENS, state.limits.chunk_tokens)
    else:
        end = entry.prompt_tokens if span is None else span[0]
        end = min([end, *(each for each in entry.saves if each > start)])
        block = entry.block_at(start)
        if block is not None and block[0] <= start:
            size = block[1] - start
        else:
            end = end if block is None else min(end, block[0])
            size = next_chunk(end - start, _most_in_chunk(state, entry, sharing))
    chunk = tuple(entry.tokens[start : start + size])
    take_chunk(state, entry, len(chunk))
    if len(chunk) < SHORTEST_STEP and not is_single:
        entry.singly = joined(entry.singly, (start, entry.computed))
    if sharing and len(chunk) >= SHORTEST_STEP:
        return _shared(state, sharing, entry, chunk)
    if entry.computed < entry.prompt_tokens:
        state.turns.append(entry.request)
    ends = entry.computed == len(entry.tokens)
    rows = len(chunk) if entry.rows in {"logits", "states"} else int(ends)
    part = entry.part(start, chunk, logit_rows=rows)
    if entry.rows is not None:
        is_state = entry.rows != "logits" and part.logit_rows > 0
        return Step(entries=(part,), states=is_state)
    if is_single:
        return Step(entries=(part,), singly=True)
    run, drafts = _run(state, [entry]) if ends else (1, 0)
    return Step(entries=(part,), run=run, drafts=drafts)


def take_chunk(state: SchedulingState, entry: RequestState, size: int) -> None:
    """Count the next tokens of a prompt as computed: they are in a step that was handed out."""
    entry.computed += size
    state.work += Work(prompt_tokens=size)
    state.shares.give(entry.who, size)
    if state.reuse is not None:
        state.reuse.computed(entry)


def _shared(
    state: SchedulingState,
    sharing: Sequence[RequestState],
    entry: RequestState,
    chunk: tuple[int, ...],
) -> Step:
    """A step with this chunk of a prompt, which counts as computed, beside tokens of answers. It is
    a run while nothing else waits: the chunks after it are as long."""
    size, start = len(chunk), entry.computed - len(chunk)
    ends = entry.computed == len(entry.tokens)
    part = entry.part(start, chunk, logit_rows=int(ends))
    tokens = (each.part(each.computed, (each.tokens[-1],), logit_rows=1) for each in sharing)
    more = 0 if part.turns or part.sees_all else _more_chunks(state, sharing, entry, size)
    rest = entry.tokens[entry.computed :][: more * size]
    if not rest and entry.computed < entry.prompt_tokens:
        state.turns.append(entry.request)  # else at the end of the run
    return Step(entries=(*tokens, part), run=1 + len(rest) // size, rest=tuple(rest))


def _more_chunks(
    state: SchedulingState, sharing: Sequence[RequestState], entry: RequestState, size: int
) -> int:
    """How many chunks of this size follow in a run, while nothing else is to be done."""
    if not state.mixed_pacing.has_tried(size):
        return 0  # it may be too long
    others_wait = state.turns or state.repeats or state.residency.awaits_room
    is_busy = len(sharing) + 1 < state.residency.num_inside
    if state.limits.stages > 1 or others_wait or is_busy or any(each.is_led for each in sharing):
        return 0
    ends = [entry.prompt_tokens, *entry.saves, *(first for first, _last in entry.singly)]
    end = min(each for each in ends if each >= entry.computed)
    # The last chunk has a step of its own, of two tokens at least.
    chunks = (end - SHORTEST_STEP - entry.computed) // size
    most = min(MOST_SHARED - 1, _most_tokens(sharing) - 1, MAX_CHUNK_TOKENS // size)
    more = max(0, min(chunks, most))
    tokens = entry.tokens[entry.computed : entry.computed + more * size]
    return 0 if any(map(is_row, tokens)) else more


def _awaits_answers(state: SchedulingState, entry: RequestState) -> bool:
    """Whether a chunk of this prompt should wait for answers under way, which are about to be ready
    for its step. Then no stage idles meanwhile."""
    steps = _decoding(state)
    if len(state.under_way) < state.limits.stages or any(step.drafted for step in steps):
        return False
    return _may_share(state, entry) and any(
        state.mixed_pacing.knows(step.batch - step.is_mixed) for step in steps
    )


def _may_share(state: SchedulingState, entry: RequestState) -> bool:
    """Whether the next chunk of this prompt may be in one step with answers."""
    start = entry.computed
    is_plain = entry.rows is None and entry.block_at(start) is None and entry.speculate != "mtp"
    is_single = any(first <= start < last for first, last in entry.singly)
    return state.limits.mixes and is_plain and not is_single


def _sharing_with(state: SchedulingState, entry: RequestState) -> list[RequestState]:
    """The answers whose next token is computed beside the next chunk of this prompt."""
    if not _may_share(state, entry):
        return []
    sharing = _sharing(state)
    has_room = len(sharing) + SHORTEST_STEP <= state.limits.chunk_tokens
    return sharing if has_room else []


def _next_turn(state: SchedulingState) -> str:
    """The request whose prompt is computed further, by fair queueing."""
    turns = [state.active.get(name) for name in state.turns]
    firsts = {entry.who: entry.request for entry in reversed(turns) if entry is not None}
    name = state.turns[0]
    if len(firsts) > 1:
        order = dict.fromkeys(entry.who for entry in turns if entry is not None)
        name = firsts[state.shares.first(order)]
    return name


def _most_in_chunk(
    state: SchedulingState, entry: RequestState, sharing: Sequence[RequestState]
) -> int:
    """The longest chunk, shortened while readers of answers would wait for it. sharing: answers in
    its step."""
    most = state.limits.most_in_chunk(entry.rows) - len(sharing)
    answering = [each.who for each in state.active.values() if each.is_answering]
    if not answering or not state.limits.rows_agree:
        return most
    waiting = (state.active.get(name) for name in state.turns)
    reading = [entry.who, *(each.who for each in waiting if each is not None)]
    times = time_of_prompts(reading, answering)
    if sharing:
        return state.mixed_pacing.chunk_tokens(most, answers=len(sharing), times=times)
    return state.pacing.chunk_tokens(most, answers=len(answering), times=times)


def _repeat(state: SchedulingState) -> Step | None:
    """Parts of answers that an earlier plan has computed, in steps as there."""
    entries = state.repeats
    if not entries:
        return None
    spans = [_next_together(entry) for entry in entries]
    if spans[0][0] <= entries[0].computed:
        if state.limits.rewinds and spans[0][1] - entries[0].computed == 1 == entries[0].to_repeat:
            # The last span may be odd: its last token was in a step with a wrong guess.
            entries[0].behind = 1
            entries[0].computed += 1
            return _decode(state)
        return _repeat_together(state, entries[0], spans[0][1])
    if not state.limits.batches_agree:  # most answers were computed alone
        del entries[1:]
    entries = [each for each, span in zip(entries, spans, strict=False) if span[0] > each.computed]
    most = min(REPEATED_TOKENS, state.limits.chunk_tokens, MAX_CHUNK_TOKENS // len(entries))
    count = min(
        most,
        *(entry.to_repeat for entry in entries),
        *(_next_together(entry)[0] - entry.computed for entry in entries),
    )
    parts = []
    for entry in entries:
        start = entry.computed
        entry.computed += count
        tokens = tuple(entry.tokens[start : entry.computed])
        parts.append(entry.part(start, tokens, logit_rows=0))
    return Step(entries=tuple(parts), singly=True)


def _next_together(entry: RequestState) -> Span:
    """The next span of an answer that is repeated several tokens at a time."""
    spans = (span for span in entry.together if span[1] > entry.computed)
    return next(spans, (len(entry.tokens), len(entry.tokens)))


def _repeat_together(state: SchedulingState, entry: RequestState, end: int) -> Step:
    """The next tokens of an answer up to `end`, in an even number of rows."""
    start, most = entry.computed, state.limits.chunk_tokens // 2 * 2
    size = min(end - start, most)
    if state.limits.rewinds:
        size -= size % 2  # nothing can be cut off without guesses
    entry.computed += size
    tokens = tuple(entry.tokens[start : entry.computed + size % 2])
    part = entry.part(start, tokens, logit_rows=0)
    return Step(entries=(part,), spare=size % 2)


def _run(state: SchedulingState, entries: Sequence[RequestState]) -> tuple[int, int]:
    """Tokens that these requests may compute by themselves, while nothing else is to be done; and
    the longest draft, of the one that is alone or of each in its turn."""
    is_led = any(entry.is_led for entry in entries)
    can_draft = len(entries) <= MOST_IN_TURN and all(_most_drafted(state, each) for each in entries)
    drafts = state.limits.drafts if can_draft else 0
    if len(entries) < state.residency.num_inside or state.residency.awaits_room:
        return 1, 0 if is_led else drafts
    first = entries[0]
    if len(entries) == 1 and drafts:
        tokens = _most_drafted(state, first)
        if not is_led:
            return tokens, drafts
        if first.is_paired:  # one step, as the next one needs further masks
            return min(1 + len(first.guesses), tokens), drafts
    if is_led:
        return 1, 0
    return _most_tokens(entries), drafts


def _most_tokens(entries: Sequence[RequestState]) -> int:
    """The most tokens that each of these may get with the memory that it has."""
    return min(  # the last token is not computed
        min(entry.memory.room + 1, entry.memory.longest) - len(entry.tokens) for entry in entries
    )


def _most_drafted(state: SchedulingState, entry: RequestState) -> int:
    """The most tokens of an answer that steps with drafts may give; 0: it has no drafts.

    Guesses have keys and values as well, until they turn out to be wrong. A request longer than
    memory would have them on disk.
    """
    if entry.speculate == "off" or not state.limits.drafts:
        return 0
    if entry.memory.longest > state.limits.memory_tokens:
        return 0
    return max(0, min(entry.memory.room, entry.memory.longest) - len(entry.tokens))
