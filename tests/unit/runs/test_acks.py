"""A peer that follows the handshake and then answers nonsense: named, and never waited for."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import numpy as np
import pytest

from edge.answers.answer import fail_all
from edge.errors import EdgeError, PeerError, PeerLostError, ProtocolError, RequestError
from edge.kernels.sampling.logprobs import Logprobs
from edge.protocol.client import PeerClient
from edge.protocol.frame_codec import Call, Done, Event, Post, from_frame
from edge.protocol.step_frames import RunStep
from edge.protocol.token_logprobs import write_logprobs
from edge.runs.acks import Acks
from edge.runs.run import PlanRun
from edge.runs.under_way import AnswersUnderWay
from edge.scheduling.prefixes import PrefixCacheIndex
from edge.scheduling.residency import Residency
from edge.scheduling.state import SchedulingLimits, SchedulingState
from edge.transport import Channel, Frame
from tests.support.scripted_peers import VOCAB, Behaviour, Results, asked, begun, peer, plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain(Call[Done]):
    kind, limit_s = "plain", 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Strange(Call[Done]):
    kind, limit_s = "strange", 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Anything(Post):
    kind = "anything"


async def run(
    behave: Behaviour,
    *,
    wants_logits: bool = False,
    logprobs: int | None = None,
    prompt: tuple[int, ...] = (1, 2, 3),
) -> Results:
    """One request to a model whose only peer behaves like this."""
    state = begun(Residency(memory_tokens=50, requests=4))
    async with peer(behave) as address:
        model = PlanRun(plan(1), vocab_size=VOCAB, hidden_size=4, on_end=fail_all)
        client = await PeerClient.connect(address, None, on_event=model.on_event)
        model.adopt((0, 0), client)
        await model.start({}, state)
        results = Results()
        if wants_logits:
            model.submit(asked(prompt, results))
        else:
            model.submit(asked(prompt, results, new_tokens=5, logprobs=logprobs))
        async with asyncio.timeout(60):
            await results.ended.wait()
        await model.aclose()
        await model.aclose()
        late = Results()
        model.submit(asked((1,), late))
        assert late.errors == [model.failure]
    return results


def test_every_peer_answers_for_itself() -> None:
    acks: Acks[str, int] = Acks()
    for request in ("a", "b"):
        acks.ask(request, ["first", "second"])
    with pytest.raises(ValueError, match="not answered yet"):
        acks.ask("a", ["first"])
    assert acks.add("a", "first", 3) is None
    for peer_name in ("first", "stranger"):
        with pytest.raises(ValueError, match="was not asked about the request, or has answered"):
            acks.add("a", peer_name, 3)
    assert acks.add("b", "second", 1) is None
    assert acks.add("a", "second", 2) == [3, 2]
    with pytest.raises(ValueError, match="nothing was asked"):
        acks.add("a", "second", 2)
    acks.ask("a", ["first"])
    assert acks.add("a", "first", 5) == [5], "a request may be asked about again"


def on_step(*answers: Frame) -> Behaviour:
    async def behave(channel: Channel, frame: Frame) -> None:
        if frame.kind == "step":
            for answer in answers:
                await channel.send(answer)

    return behave


ROWS = np.zeros((3, VOCAB), np.float32).tobytes()

MISSING = "missing"


def told(**changed: object) -> Frame:
    """A report of one token, but for these fields."""
    fields: dict[str, object] = {
        "tokens": [5], "ends": [None], "last": True, "chosen_s": 1.0, "drafted": 0,
        "together": False, "pairs": False, "guesses": [],
    }  # fmt: skip
    fields |= changed
    return Frame("tokens", {name: each for name, each in fields.items() if each is not MISSING})


@pytest.mark.parametrize(
    "answer",
    [
        told(tokens=[VOCAB]),
        told(tokens=[-1]),
        told(tokens=["5"]),
        told(tokens=[5, 6], ends=[None, None]),
        told(tokens=[], ends=[]),
        told(tokens=5),
        told(last="yes"),
        told(chosen_s=MISSING),
        told(chosen_s=-1.0),
        told(chosen_s=1e300),
        told(chosen_s="now"),
        told(last=MISSING),
        told(drafted=MISSING),
        told(drafted=1, together=True),
        told(together=True),
        told(guesses=[{"tokens": [3], "in_turn": 1}]),
        told(guesses=[{"tokens": [VOCAB], "in_turn": 1}]),
        told(guesses=[{"tokens": [3] * 16, "in_turn": 1}]),
        told(guesses=[{"tokens": [3], "in_turn": 99}]),
        told(guesses=[{"tokens": [3], "in_turn": 1}] * 2),
        told(guesses=[{"tokens": [3], "in_turn": 1}], last=False),
        told(guesses=[[3]]),
        told(ends=[]),
        told(ends=["late"]),
        told(ends=[[]]),
        told(ends=MISSING),
        Frame("tokens"),
        Frame(
            "tokens",
            {
                "tokens": [5],
                "ends": [None],
                "last": True,
                "chosen_s": 1.0,
                "drafted": 0,
                "together": False,
                "pairs": False,
                "guesses": [],
            },
            write_logprobs([Logprobs(logprob=-1.0, top=())]),
        ),
        Frame("logits", {}, ROWS),
        Frame("poem", {"tokens": [5], "last": True, "chosen_s": 1.0, "drafted": 0}),
    ],
    ids=lambda frame: f"{frame.kind} {dict(frame.header)}",
)
def test_tokens_that_cannot_be(answer: Frame) -> None:
    results = asyncio.run(run(on_step(answer)))
    (error,) = results.errors
    assert isinstance(error, PeerError)
    assert error.peer == "odd"
    assert "sent a malformed" in str(error)
    assert results.tokens == []


NO_TOKENS = told(tokens=[], ends=[])


def test_reports_of_another_kind_than_the_step() -> None:
    """Else the caller would wait for ever."""
    results = asyncio.run(run(on_step(NO_TOKENS), wants_logits=True))
    assert "no token for a step that gives rows" in str(results.errors[0])
    results = asyncio.run(run(on_step(Frame("logits")), prompt=(1, 2, 3, 4, 5, 6)))
    assert "rows for a step that gives none" in str(results.errors[0])


def test_more_reports_than_a_run_has_tokens() -> None:
    """The prompt and 5 new tokens are one run of 5; its end is never told."""
    token = told(last=False)
    results = asyncio.run(run(on_step(*[token] * 9)))
    assert len(results.tokens) <= 5
    assert "sent a malformed 'tokens'" in str(results.errors[0])


def test_a_token_outside_the_vocabulary_of_an_answer_that_was_cancelled() -> None:
    answers = AnswersUnderWay(VOCAB, 4, "none")
    answers.check_ids((0, VOCAB - 1))
    with pytest.raises(ProtocolError, match=f"token {VOCAB} is outside a vocabulary of {VOCAB}"):
        answers.check_ids((0, VOCAB))


def test_more_answers_than_steps() -> None:
    fine = told()
    results = asyncio.run(run(on_step(fine, fine, fine)))
    assert results.tokens[0] == 5
    assert "odd" in str(results.errors[0])


@pytest.mark.parametrize("payload", [b"", ROWS[:-4], ROWS + ROWS, b"abc"], ids=len)
def test_logits_of_another_size(payload: bytes) -> None:
    results = asyncio.run(run(on_step(Frame("logits", {}, payload)), wants_logits=True))
    assert "sent a malformed 'logits'" in str(results.errors[0])


def test_a_failure_is_passed_on() -> None:
    told = {"error": "peer", "message": "no memory\x1b[2J left", "remedy": None, "peer": None}
    failed = Frame("failed", told)
    results = asyncio.run(run(on_step(failed)))
    assert str(results.errors[0]) == "peer odd: no memory [2J left"


def test_a_peer_that_hangs_up() -> None:
    async def behave(channel: Channel, frame: Frame) -> None:
        if frame.kind == "step":
            await channel.aclose()

    results = asyncio.run(run(behave))
    assert isinstance(results.errors[0], PeerLostError)
    assert results.errors[0].peer == "odd"


async def run_on_two(odd: Behaviour, *, has_prefixes: bool = False) -> list[EdgeError]:
    """Two requests that take turns in the memory of two stages, of which the second samples.

    The first stage's peer behaves as it is told to; the second answers steps and nothing else.
    """

    async def sample(channel: Channel, frame: Frame) -> None:
        if frame.kind == "step":
            step = from_frame(RunStep, frame).step
            tokens = [5] * sum(entry.logit_rows for entry in step.entries)
            header = {
                "tokens": tokens,
                "ends": [None] * len(tokens),
                "last": True,
                "chosen_s": 1.0,
                "drafted": 0,
                "together": False,
                "pairs": False,
                "guesses": [],
            }
            await channel.send(Frame("tokens", header))

    state = SchedulingState.new(
        SchedulingLimits(stages=2, chunk_tokens=4, logit_chunk_tokens=4),
        Residency(memory_tokens=14, disk_tokens=100, requests=4, quantum_tokens=2),
        PrefixCacheIndex(chunk_tokens=2, fewest_tokens=2) if has_prefixes else None,
    )
    async with peer(odd, "odd") as first, peer(sample, "fine") as second:
        model = PlanRun(plan(2), vocab_size=VOCAB, hidden_size=4, on_end=fail_all)
        for stage, address in enumerate((first, second)):
            model.adopt(
                (stage, 0), await PeerClient.connect(address, None, on_event=model.on_event)
            )
        await model.start({}, state)
        results = Results(), Results()
        for each in results:
            model.submit(asked((1, 2, 3, 4, 5), each, new_tokens=8))
        async with asyncio.timeout(60):
            for each in results:
                await each.ended.wait()
        await model.aclose()
    return [each.errors[0] for each in results]


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("swap_out", Frame("swapped_out", {"why_not": None})),
        ("match_prefix", Frame("prefix_matched", {"tokens": 2, "points": [], "stored": []})),
    ],
    ids=["swap out", "match prefix"],
)
def test_a_peer_that_answers_twice_does_not_stand_in_for_another(
    question: str, answer: Frame
) -> None:
    """The other has said nothing yet: what it has must not be taken for moved, or for known."""

    async def behave(channel: Channel, frame: Frame) -> None:
        if frame.kind == question:
            header = {**answer.header, "request": frame.header["request"]}
            for _ in range(2):
                await channel.send(Frame(answer.kind, header))

    for error in asyncio.run(run_on_two(behave, has_prefixes=question == "match_prefix")):
        why = "this peer was not asked about the request, or has answered already"
        assert str(error) == f"peer odd: sent a malformed {answer.kind!r}: {why}"


@pytest.mark.parametrize(
    "answer",
    [
        told(tokens=[], ends=[]),
        Frame("logits"),
    ],
    ids=["tokens", "logits"],
)
def test_a_peer_that_answers_for_the_one_that_samples(answer: Frame) -> None:
    for error in asyncio.run(run_on_two(on_step(answer))):
        assert isinstance(error, PeerError)
        assert error.peer == "odd"
        assert "only the peer that samples may answer steps" in str(error)


def test_closing_tells_those_who_wait() -> None:
    async def main() -> Results:
        async def say_nothing(_channel: Channel, _frame: Frame) -> None: ...

        state = begun(Residency(memory_tokens=50, requests=4))
        async with peer(say_nothing) as address:
            model = PlanRun(plan(1), vocab_size=VOCAB, hidden_size=4, on_end=fail_all)
            model.adopt((0, 0), await PeerClient.connect(address, None, on_event=model.on_event))
            await model.start({}, state)
            results = Results()
            model.submit(asked((1, 2), results))
            await asyncio.gather(model.aclose(), model.aclose(), model.abort())
        return results

    results = asyncio.run(main())
    assert isinstance(results.errors[0], RequestError)
    assert "the model is closed" in str(results.errors[0])


def test_a_call_that_is_answered_by_something_else() -> None:
    async def main() -> None:
        async def behave(channel: Channel, frame: Frame) -> None:
            await channel.send(Frame("poem", {"call": frame.header["call"]}))

        async with peer(behave) as address:
            client = await PeerClient.connect(address, None)
            try:
                with pytest.raises(ProtocolError, match="odd answers 'strange' by 'poem'"):
                    await client.call(Strange())
                assert await client.call(Plain()) == Done()
            finally:
                await client.aclose()

    asyncio.run(main())


def test_an_event_that_breaks_its_reader_ends_the_connection() -> None:
    """A defect of ours must not leave anybody waiting for ever."""

    async def main() -> None:
        async def behave(channel: Channel, _frame: Frame) -> None:
            await channel.send(Frame("logits"))

        def stumble(_client: PeerClient, _event: Event) -> None:
            raise LookupError("a defect")

        async with peer(behave) as address:
            client = await PeerClient.connect(address, None, on_event=stumble)
            lost: list[EdgeError] = []
            client.watch(lost.append)
            try:
                with pytest.raises(ProtocolError, match="cannot be handled: a defect"):
                    await client.call(Strange())
                with pytest.raises(ProtocolError):
                    await client.post(Anything())
                assert len(lost) == 1
                client.watch(lost.append)
                assert len(lost) == 2, "whoever asks later is told, too"
            finally:
                await client.aclose()
                await client.aclose()

    asyncio.run(main())


@pytest.mark.parametrize(
    "logprobs",
    [
        [None],
        [Logprobs(logprob=-1.0, top=((5, -1.0),))],
        [Logprobs(logprob=-1.0, top=((5, -1.0), (VOCAB, -2.0)))],
        [Logprobs(logprob=-1.0, top=((5, -1.0), (4, -2.0)))] * 2,
    ],
    ids=["none", "too few", "outside the vocabulary", "of two tokens"],
)
def test_logprobs_that_were_not_asked_for(logprobs: list[Logprobs | None]) -> None:
    answer = Frame("tokens", told().header, write_logprobs(logprobs))
    results = asyncio.run(run(on_step(answer), logprobs=2))
    (error,) = results.errors
    assert "sent a malformed" in str(error)
    assert results.tokens == []
