"""Shards of a plan as their peers run them, on the null back end, linked in memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edge.backends.interface import ShardWeights
from edge.backends.null.made_up import replies
from edge.engine.prefix_cache import PrefixStorage
from edge.engine.shard_engine import ShardEngine
from edge.kernels.sampling.parameters import SamplingParameters
from edge.offload import Manifest, MemoryKVTier, PrefixMemory, PrefixStore
from edge.protocol.error_codec import Failed
from edge.protocol.frame_codec import Event
from edge.protocol.kv_frames import Reserved, SwappedOut
from edge.protocol.prefix_frames import PrefixMatched
from edge.protocol.step import Step, StepEntry
from edge.protocol.step_times import StepTimes
from edge.protocol.wire_rules import WireRules
from edge.transport import Link, WireRule
from edge.weights.formats import KvDtype
from tests.support.linked_shards import (
    LIMITS,
    REPORT_WITHIN_S,
    RUN,
    SPEC,
    VOCAB,
    MadeUpBackend,
    linked,
    make_plan,
    seats,
    shards,
)
from tests.support.plans import solo_assignment

PLANS = {
    "solo": make_plan([VOCAB], stage_before=False),
    "pipeline": make_plan([VOCAB], stage_before=True),
    "tensor": make_plan([1100, 0, 1900], stage_before=False),
    "mixed": make_plan([1100, 1900], stage_before=True),
}
PROMPT = list(range(5, 25))
SECRET = b"of an owner".ljust(32)


def kept_in(
    memory: PrefixMemory, disk: PrefixStore | None = None, *, secret: bytes = SECRET
) -> PrefixStorage:
    size = LIMITS.chunk_tokens
    return PrefixStorage(memory=memory, disk=disk, secret=secret, disk_block_tokens=size)


class HeldBackLink:
    """A link whose sends return only when they are let, though what is sent arrives."""

    def __init__(self, inner: Link, may_return: threading.Event) -> None:
        self._inner = inner
        self._may_return = may_return
        self.peer = inner.peer
        self.receive, self.close, self.state = inner.receive, inner.close, inner.state

    def send(self, array: NDArray[Any]) -> None:
        self._inner.send(array)
        self._may_return.wait(REPORT_WITHIN_S)

    def exchange(self, outgoing: NDArray[Any], incoming: NDArray[Any]) -> None:
        raise AssertionError("stages only send and receive")


def test_a_step_is_measured_by_every_shard_once_its_token_is_known() -> None:
    """Also by one that has sent its hidden state and not come to count the step."""
    may_return = threading.Event()

    def wrap(link: Link, seat: tuple[int, int]) -> Link:
        return HeldBackLink(link, may_return) if seat == (0, 0) else link

    entry = StepEntry(request="r", position=0, tokens=(1, 2), logit_rows=1)
    with shards([VOCAB], stage_before=True, wrap=wrap) as found:
        try:
            found.begin("r", SamplingParameters())
            assert found.tokens(Step(entries=(entry,))).last
            measured = [session.measure() for session in found.sessions]
        finally:
            may_return.set()
        prompts = [each.result(REPORT_WITHIN_S)[0] for each in measured]
        assert [each.steps for each in prompts] == [1, 1]


def test_measuring_does_not_wait_for_the_end_of_a_run() -> None:
    """The shard tells in the middle of it, and each step once."""
    with shards([VOCAB]) as found:
        (session,) = found.sessions
        tokens = [1, *found.reply("r", [1], 1)]
        session.measure().result(REPORT_WITHIN_S)
        measured: list[Future[tuple[StepTimes, StepTimes]]] = []
        # On the compute thread: so the run cannot overtake it.
        found.on_report = lambda _event: measured.append(session.measure())
        found.go_on("r", tokens, RUN)
        assert [each.result(REPORT_WITHIN_S)[1].steps for each in measured] == [1] * RUN


@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
@pytest.mark.parametrize("plan", PLANS)
def test_shards_of_any_plan_give_the_reply_of_the_model(plan: str, kv_dtype: KvDtype) -> None:
    """A prompt in chunks, a run, and a run after it; every shard computes each token once."""
    with linked(PLANS[plan], kv_dtype=kv_dtype) as found:
        calibrated = found.programs[0].counts.tokens
        reply = found.reply("r", PROMPT, 5)
        reply += found.go_on("r", PROMPT + reply, 4)
        assert reply == replies(SPEC, PROMPT, 9)
        computed = {program.counts.tokens - calibrated for program in found.programs}
        assert computed == {len(PROMPT) + 8}


def test_a_request_goes_and_comes_back_in_every_shard() -> None:
    """While another one has its slot."""
    other = [40, 41, 42]
    limits = replace(LIMITS, requests=1)
    with linked(PLANS["mixed"], limits=limits, tier=lambda seat: MemoryKVTier(1 << 20)) as found:
        reply = found.reply("r", PROMPT, 3)
        gone = found.each(lambda session: session.swap_out("r"))
        assert gone == [SwappedOut(request="r", why_not=None)] * 3
        assert found.reply("o", other, 2) == replies(SPEC, other, 2)
        found.finish("o")
        assert reply + found.go_on("r", PROMPT + reply, 4) == replies(SPEC, PROMPT, 7)


def test_no_room_out_of_memory_is_said_and_changes_nothing() -> None:
    """Each shard says it of its own tier, or that it has none."""
    tiers = {(0, 0): MemoryKVTier(1 << 20), (1, 0): MemoryKVTier(100), (1, 1): MemoryKVTier(100)}
    with linked(PLANS["mixed"], tier=tiers.__getitem__) as found:
        reply = found.reply("r", PROMPT, 3)
        reserved = found.each(lambda session: session.reserve("r", 40))
        for said in (reserved, found.each(lambda session: session.swap_out("r"))):
            reasons = [each.why_not for each in said if isinstance(each, Reserved | SwappedOut)]
            assert sorted("limit of 100" in str(each) for each in reasons) == [False, True, True]
        assert reply + found.go_on("r", PROMPT + reply, 4) == replies(SPEC, PROMPT, 7)


@pytest.mark.parametrize("plan", ["solo", "tensor"])
def test_a_request_longer_than_memory_goes_through_it_layer_by_layer(plan: str) -> None:
    """Alone; a shorter one takes turns with it."""
    limits = replace(LIMITS, cached_tokens=22, disk_tokens=200)
    short = PROMPT[:4]
    with linked(PLANS[plan], limits=limits, tier=lambda seat: MemoryKVTier(1 << 20)) as found:
        reply = found.reply("long", PROMPT, 8)
        found.each(lambda session: session.swap_out("long"))
        assert found.reply("short", short, 3) == replies(SPEC, short, 3)
        found.each(lambda session: session.swap_out("short"))
        assert reply + found.go_on("long", PROMPT + reply, 6) == replies(SPEC, PROMPT, 14)


@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
@pytest.mark.parametrize("plan", PLANS)
def test_a_prompt_that_begins_like_another_is_not_computed_again(
    plan: str, kv_dtype: KvDtype, tmp_path: Path
) -> None:
    """By other engines on the same stores, as after a restart. Where one shard has lost its block,
    all compute it again. Sampling looks back at what was skipped."""
    looks_back = SamplingParameters(temperature=0.9, repetition_penalty=1.5, seed=5)
    size = LIMITS.chunk_tokens
    found: list[list[int]] = []
    for expected in ([0], [size], [0, size]):
        if len(expected) > 1:
            for file in (tmp_path / "(0, 0)").iterdir():
                file.unlink()
        places = {
            seat: kept_in(PrefixMemory(), PrefixStore(tmp_path / f"{seat}", 1 << 20))
            for seat in seats(PLANS[plan])
        }
        with linked(PLANS[plan], kv_dtype=kv_dtype, places=places.__getitem__) as engines:
            before = engines.programs[0].counts.tokens
            matched = engines.each(
                lambda session: session.match_prefix("r", np.asarray(PROMPT, "<i4"))
            )
            tokens = [each.tokens for each in matched if isinstance(each, PrefixMatched)]
            assert set(tokens) == set(expected[: len(matched)])
            known = min(tokens)
            found.append(engines.reply("r", PROMPT, 4, known=known, parameters=looks_back))
            assert engines.programs[0].counts.tokens - before == len(PROMPT) - known + 3
    assert found == [found[0]] * 3


@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
@pytest.mark.parametrize("plan", PLANS)
def test_what_a_session_has_read_is_there_for_the_next(plan: str, kv_dtype: KvDtype) -> None:
    """In memory, also the part of an answer that was computed once more as a prompt is; for who has
    the secret, and as far as every shard has it."""
    memories = {seat: PrefixMemory() for seat in seats(PLANS[plan])}
    for memory in memories.values():
        memory.limit(1 << 24)
    prompt = [*range(5, 38)]

    def ask(
        prompt: list[int], count: int, *, secret: bytes = SECRET, keeps_answer: bool = False
    ) -> tuple[int, list[int]]:
        places = {seat: kept_in(memories[seat], secret=secret) for seat in memories}
        with linked(PLANS[plan], kv_dtype=kv_dtype, places=places.__getitem__) as engines:
            matched = engines.each(
                lambda session: session.match_prefix("r", np.asarray(prompt, "<i4"))
            )
            known = min(each.tokens for each in matched if isinstance(each, PrefixMatched))
            before = engines.programs[0].counts.tokens
            answer = engines.reply("r", prompt, count, known=known)
            tokens = len(prompt) + count - 1
            assert engines.programs[0].counts.tokens - before == tokens - known
            said = np.asarray(answer[:-1], np.int64) if keeps_answer else None
            for session in engines.sessions:
                kept = tokens if keeps_answer else len(prompt)
                session.finish("r", kept_tokens=kept, answer=said)
            return known, answer

    known, answer = ask(prompt, 16, keeps_answer=True)
    assert (known, answer) == (0, replies(SPEC, prompt, 16))
    assert ask(prompt, 16) == (16, answer), "two tokens or more are computed"
    longer = [*prompt, *answer, 7, 8]
    expected = replies(SPEC, longer, 8)
    assert ask(longer, 8, secret=b"another's".ljust(32)) == (0, expected)
    assert ask(longer, 8) == (48, expected)
    next(iter(memories.values())).limit(0)
    assert ask(longer, 8) == (0, expected)


def _await(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + REPORT_WITHIN_S
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_answers_are_stored_on_disk_without_a_further_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as they are kept in memory. Two blocks are of the prompt, one of the answer. The
    request ends while the first is written."""
    store, size = PrefixStore(tmp_path, 1 << 20), LIMITS.chunk_tokens
    has_ended, put = threading.Event(), store.put

    def put_later(*block: Any) -> bool:
        assert has_ended.wait(REPORT_WITHIN_S)
        return put(*block)

    monkeypatch.setattr(store, "put", put_later)
    prompt = [*range(5, 5 + 2 * size + 3)]
    with linked(PLANS["solo"], places=lambda _seat: kept_in(PrefixMemory(), store)) as found:
        (session,) = found.sessions
        found.each(lambda each: each.match_prefix("r", np.asarray(prompt, "<i4")))
        answer = found.reply("r", prompt, size)
        said = np.asarray(answer[:-1], np.int64)
        session.finish("r", kept_tokens=len(prompt) + size - 1, answer=said)
        _await(lambda: session._awaited is not None)
        has_ended.set()
        _await(lambda: len(list(tmp_path.iterdir())) == 3)
    longer = np.asarray([*prompt, *answer, 7, 8], "<i4")
    with linked(PLANS["solo"], places=lambda _seat: kept_in(PrefixMemory(), store)) as found:
        matched = found.each(lambda each: each.match_prefix("r", longer))
    assert matched == [PrefixMatched(request="r", tokens=3 * size, stored=(3 * size,))]


@pytest.mark.parametrize(
    ("is_strict", "expected"), [(False, [0, 32, 32, 32, 32]), (True, [0, 0, 0, 0, 32])]
)
def test_what_one_plan_has_read_is_there_for_another(is_strict: bool, expected: list[int]) -> None:
    """On devices that have it: here all shards are of one. Where no bit may depend on it, it is
    there for the same plan alone."""
    limits = replace(LIMITS, batch_invariant=is_strict)
    memory = PrefixMemory()
    memory.limit(1 << 24)
    prompt, known = [*range(5, 42)], []
    for plan in ("tensor", "solo", "mixed", "pipeline", "mixed"):
        with linked(PLANS[plan], limits=limits, places=lambda _seat: kept_in(memory)) as found:
            matched = found.each(
                lambda session: session.match_prefix("r", np.asarray(prompt, "<i4"))
            )
            (tokens,) = {each.tokens for each in matched if isinstance(each, PrefixMatched)}
            assert found.reply("r", prompt, 4, known=tokens) == replies(SPEC, prompt, 4)
            for session in found.sessions:
                session.finish("r", kept_tokens=len(prompt))
        known.append(tokens)
    assert known == expected


def test_a_step_that_fails_is_the_last_one() -> None:
    """Its error is reported once; nothing is computed after it, and closing waits for nobody."""
    with linked(PLANS["solo"]) as found:
        (session,) = found.sessions
        too_long = tuple(range(LIMITS.chunk_tokens + 1))
        entry = StepEntry(request="r", position=0, tokens=too_long, logit_rows=1)
        failed = found.step(Step(entries=(entry,)))
        assert isinstance(failed, Failed)
        assert "takes up to 4 requests or 16 tokens" in failed.message
        session.step(Step(entries=(replace(entry, tokens=(1,)),)))
        session.swap_out("r")
        session.match_prefix("r", np.asarray(PROMPT, "<i4"))
        session.finish("r")
        prompt_times, _decode = session.measure().result(REPORT_WITHIN_S)
        assert (prompt_times.steps, found.programs[0].counts.steps) == (0, 0)
        session.close()
        assert found.reports.empty()


def test_a_program_outlives_its_session_if_its_session_did_not_break_it() -> None:
    """It serves another one, which loads none; who failed for itself gives nothing away."""
    with linked(PLANS["solo"]) as found:
        (first,), (backend,) = found.sessions, found.backends
        assert found.reply("r", PROMPT, 8) == replies(SPEC, PROMPT, 8)
        program = first.close(parks=True)
        assert program is not None
        second = ShardEngine(first.assignment, found.hear)
        weights = ShardWeights(path=Path(), manifest=Manifest(tensors=(), total_bytes=0))
        second.resume(program)
        second.load(backend, weights).result(REPORT_WITHIN_S)
        assert len(backend.programs) == 1
        second.connect({}, {})
        found.sessions[0] = second
        assert found.reply("r", PROMPT, 8) == replies(SPEC, PROMPT, 8)
        too_long = tuple(range(LIMITS.chunk_tokens + 1))
        entry = StepEntry(request="q", position=0, tokens=too_long, logit_rows=1)
        assert isinstance(found.step(Step(entries=(entry,))), Failed)
        assert second.close(parks=True) is None
        assert first.close() is None


def test_whoever_misses_a_neighbour_names_it() -> None:
    """In the middle of a run; the session that leaves says nothing.

    A stage before it waits for as long as a neighbour may say nothing.
    """
    with linked(PLANS["mixed"], link_timeout_s=5.0) as found:
        tokens = [*PROMPT, *found.reply("r", PROMPT, 1)]
        gone = found.sessions[2]
        leaving: list[threading.Thread] = []

        def leave(_event: Event) -> None:
            if not leaving:
                leaving.append(threading.Thread(target=gone.close))
                leaving[0].start()
                gone.links.close()

        found.on_report = leave
        entry = StepEntry(request="r", position=len(PROMPT), tokens=(tokens[-1],), logit_rows=1)
        event = found.step(Step(entries=(entry,), run=30))
        failures: list[Failed] = []
        while len(failures) < 2:
            if isinstance(event, Failed):
                failures.append(event)
            if len(failures) < 2:
                event = found.report()
        leaving[0].join()
        assert {failed.error for failed in failures} == {"lost"}
        assert "device 1.1" in {failed.peer for failed in failures}


@pytest.mark.parametrize("how", ["yield", "finish"])
def test_a_run_ends_after_the_token_under_way(how: str) -> None:
    """So that others have their turn, or because nobody waits for the rest."""
    with linked(PLANS["mixed"]) as found:
        reply = found.reply("r", PROMPT, 1)
        events: list[Event] = []

        def end(event: Event) -> None:
            events.append(event)
            if len(events) == 2:
                found.sessions[1].yield_run() if how == "yield" else found.finish("r")

        found.on_report = end
        reply += found.go_on("r", PROMPT + reply, 20)
        assert reply == replies(SPEC, PROMPT, 1 + 3)
        if how == "yield":
            assert reply + found.go_on("r", PROMPT + reply, 3) == replies(SPEC, PROMPT, 7)


def test_layers_leave_for_the_disk_in_the_middle_of_a_run() -> None:
    with linked(PLANS["solo"]) as found:
        (session,), (program,) = found.sessions, found.programs
        reply = found.reply("r", PROMPT, 1)
        moved: list[Future[None]] = []

        def move(_event: Event) -> None:
            if not moved:
                moved.append(session.stream(2))

        found.on_report = move
        reply += found.go_on("r", PROMPT + reply, RUN)
        assert reply == replies(SPEC, PROMPT, 1 + RUN)
        assert program.counts.streamed_layers == 2 * (RUN - 1)
        assert moved[0].done()


def test_layers_that_are_to_come_from_disk_do_so_from_the_load_on() -> None:
    """A peer's memory may become less while a shard waits for others to be loaded."""
    rules = WireRules(sums=(WireRule(),), hops=())
    engine = ShardEngine(solo_assignment(SPEC, LIMITS, rules), lambda _event: None)
    try:
        engine.stream(2).result(REPORT_WITHIN_S)
        backend = MadeUpBackend()
        weights = ShardWeights(path=Path(), manifest=Manifest(tensors=(), total_bytes=5))
        assert engine.load(backend, weights).result(REPORT_WITHIN_S) == 5
        assert backend.programs[0].streamed == 2
    finally:
        engine.close()


def test_closing_ends_a_step_that_waits_for_a_neighbour() -> None:
    with linked(PLANS["pipeline"]) as found:
        entry = StepEntry(request="r", position=0, tokens=(1,), logit_rows=1)
        found.sessions[1].step(Step(entries=(entry,)))
        found.sessions[1].close()
        assert found.reports.empty()


def test_closing_interrupts_what_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    computes, is_interrupted = threading.Event(), threading.Event()

    def forward(*_step: object) -> None:
        computes.set()
        assert is_interrupted.wait(REPORT_WITHIN_S)
        raise RuntimeError("interrupted")

    with linked(PLANS["solo"]) as found:
        (program,) = found.programs
        monkeypatch.setattr(program, "logits", forward)
        monkeypatch.setattr(program, "interrupt", is_interrupted.set)
        entry = StepEntry(request="r", position=0, tokens=(1,), logit_rows=1)
        found.sessions[0].step(Step(entries=(entry,)))
        assert computes.wait(REPORT_WITHIN_S)
        found.sessions[0].close()
        assert found.reports.empty(), "nobody hears of an error"
