"""Requests outlive the plan that runs them: another goes on where the first one ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import MinNewTokensLengthLogitsProcessor

from edge.answers.answer import Answer, OnEnd
from edge.backends.interface import HostLogits
from edge.engine.distributed_sampling import DistributedSampling
from edge.errors import (
    CapacityError,
    EdgeError,
    NetworkError,
    PeerError,
    PeerLostError,
    RequestError,
)
from edge.kernels.sampling.parameters import SamplingParameters
from edge.kernels.sampling.reference import sample
from edge.protocol.client import PeerClient
from edge.protocol.frame_codec import Event, from_frame, to_frame
from edge.protocol.step import Step
from edge.protocol.step_frames import Logits, RunStep, Tokens
from edge.protocol.token_masks import read_masks
from edge.runs import run
from edge.runs.model import MOST_LOSSES_WITHOUT_A_TOKEN, RunningModel
from edge.runs.run import PlanRun
from edge.scheduling.orders import Orders
from edge.scheduling.residency import Residency
from edge.scheduling.state import SchedulingState
from edge.text.detokenizer import Vocabulary
from edge.text.grammar import Grammar, Grammars
from edge.transport import Channel, Frame
from tests.support.scripted_peers import VOCAB, Owner, Results, asked, begun, peer, plan
from tests.support.small_tokenizers import letters

PARAMETERS = SamplingParameters(
    temperature=1.1,
    repetition_penalty=1.7,
    frequency_penalty=0.8,
    presence_penalty=-1.5,
    logit_bias={2: 1.5, 9: -2.0},
    top_p=0.9,
    seed=7,
)
NEW_TOKENS = 12


def logits_after(tokens: Sequence[int]) -> NDArray[np.float32]:
    return np.random.default_rng(tokens).normal(size=VOCAB).astype(np.float32)


class SamplingPeer:
    """All of a plan: chooses tokens as peers do, from logits that follow from a request's tokens.

    After `steps` steps it hangs up, in the middle of a run if that is where it is. Its clock says
    `clock_s` at first, and `step_s` more at each step.
    """

    def __init__(self, *, steps: int | None, clock_s: float = 1.0, step_s: float = 1e-6) -> None:
        self._steps_left = steps
        self._clock_s = clock_s
        self._step_s = step_s
        self._choice = DistributedSampling([range(VOCAB)], 0)
        self._tokens: dict[str, list[int]] = {}

    async def __call__(self, channel: Channel, frame: Frame) -> None:
        if frame.kind == "finish":
            self._choice.forget(frame.header["request"])
        elif frame.kind == "step":
            post = from_frame(RunStep, frame)
            for request, terms in post.terms.items():
                self._choice.begin(request, terms)
            masks = read_masks(post.masked, post.step.run, post.masks, VOCAB)
            self._choice.allow(post.step, masks)
            step: Step | None = post.step
            while step is not None:
                if self._steps_left == 0:
                    await channel.aclose()
                    return
                if self._steps_left is not None:
                    self._steps_left -= 1
                self._clock_s += self._step_s
                step = await self._compute(channel, step)

    async def _compute(self, channel: Channel, step: Step) -> Step | None:
        rows = []
        for entry in step.entries:
            known = self._tokens.setdefault(entry.request, [])
            assert entry.position == len(known), "each token is computed once"
            known.extend(entry.tokens)
            stops = range(len(known) - step.logit_rows + 1, len(known) + 1)
            rows.append([logits_after(known[:stop]) for stop in stops])
        logits = np.array(rows, np.float32).reshape(step.batch, step.logit_rows, VOCAB)
        if self._choice.wants_logits(step):
            await report(channel, Logits(rows=logits.tobytes()))
            return None
        chosen = self._choice.choose(
            step, HostLogits(logits, logits[..., :0]), ask_all=lambda: None
        )
        tokens = [each.token for each in chosen]
        ends = self._choice.take(step, tokens)
        last = step.run == 1 or any(ends)
        await report(
            channel,
            Tokens(tokens=tuple(tokens), ends=tuple(ends), last=last, chosen_s=self._clock_s),
        )
        return None if last else step.following(tokens)


async def report(channel: Channel, event: Event) -> None:
    await channel.send(to_frame(event.kind, event))


async def load(address: str, owner: OnEnd) -> PlanRun:
    state = begun(Residency(memory_tokens=200, requests=4), logit_chunk_tokens=2)
    model = PlanRun(plan(1), vocab_size=VOCAB, hidden_size=4, on_end=owner)
    model.adopt((0, 0), await PeerClient.connect(address, None, on_event=model.on_event))
    await model.start({}, state)
    return model


def expected(prompt: Sequence[int]) -> list[int]:
    tokens = list(prompt)
    for position in range(len(prompt), len(prompt) + NEW_TOKENS):
        logits = logits_after(tokens)
        tokens.append(
            sample(
                logits,
                history=tokens,
                prompt_tokens=len(prompt),
                parameters=PARAMETERS,
                position=position,
            )
        )
    return tokens[len(prompt) :]


def request(prompt: Sequence[int], sink: Results) -> Answer:
    return asked(prompt, sink, new_tokens=NEW_TOKENS, sampling=PARAMETERS)


PROMPTS = [(1, 2, 3, 4, 5, 6), (7,), (8, 9)]


@pytest.mark.parametrize("steps", [0, 1, 2, 4, 7, 15])
def test_what_a_plan_leaves_another_finishes_with_the_same_tokens(steps: int) -> None:
    """However far it came: in the prompt, in a run, or when some have ended. And each token was
    chosen at a time by the clock here, though the devices that chose them have others, of which one
    says that it takes years."""

    async def main() -> None:
        owner, begun_s = Owner(), time.monotonic()
        replies = [Results() for _prompt in PROMPTS]
        rows = Results()
        async with (
            peer(SamplingPeer(steps=steps, clock_s=9e8)) as lost,
            peer(SamplingPeer(steps=None, clock_s=2.0, step_s=1e8)) as other,
            asyncio.timeout(60),
        ):
            model = await load(lost, owner)
            for prompt, reply in zip(PROMPTS, replies, strict=True):
                model.submit(request(prompt, reply))
            model.submit(asked(PROMPTS[0], rows))
            await owner.told.wait()
            await model.aclose()
            assert isinstance(owner.failure, PeerLostError)
            assert not any(reply.errors for reply in [*replies, rows]), "the owner decides"
            waiting = [each.id for each in owner.unfinished]
            assert len(waiting) == len({*waiting})
            second = await load(other, Owner())
            for unfinished in owner.unfinished:
                second.submit(unfinished)
            for each in [*replies, rows]:
                await each.ended.wait()
            await second.aclose()
        assert [reply.tokens for reply in replies] == [expected(prompt) for prompt in PROMPTS]
        for reply in replies:
            assert reply.chosen_s == sorted(reply.chosen_s)
            assert begun_s <= reply.chosen_s[0] <= reply.chosen_s[-1] < time.monotonic() + 1e-3
        assert rows.found is not None
        ends = range(1, len(PROMPTS[0]) + 1)
        np.testing.assert_array_equal(rows.found, [logits_after(PROMPTS[0][:end]) for end in ends])

    asyncio.run(main())


GRAMMAR = Grammar('start: ("ab" | "cab" | "d"){40}')
LETTERS = ("a", "b", "c", "ab", "ca", "d", "bd", "<end>", "abab")


def kept_to_grammar(prompt: Sequence[int]) -> list[int]:
    grammars = Grammars(Vocabulary(letters(LETTERS)), vocab_size=VOCAB, end_ids=frozenset({7}))
    matcher, tokens = grammars.begin(GRAMMAR), list(prompt)
    for position in range(len(prompt), len(prompt) + NEW_TOKENS):
        token = sample(
            logits_after(tokens),
            history=tokens,
            prompt_tokens=len(prompt),
            parameters=PARAMETERS,
            position=position,
            allowed=matcher.allowed(),
        )
        matcher.take(token)
        tokens.append(token)
    return tokens[len(prompt) :]


@pytest.mark.parametrize("steps", [0, 3, 9])
def test_an_answer_keeps_to_its_grammar_on_every_plan_that_runs_a_part_of_it(steps: int) -> None:
    """Beside one that keeps to none, and one whose grammar fails, which ends alone."""

    async def main() -> None:
        owner, sinks = Owner(), [Results() for _prompt in PROMPTS]
        grammars = Grammars(Vocabulary(letters(LETTERS)), vocab_size=VOCAB, end_ids=frozenset({7}))
        kept, free, fails = map(request, PROMPTS, sinks)
        kept.matcher = grammars.begin(GRAMMAR)
        fails.matcher = grammars.begin(GRAMMAR)
        with pytest.raises(RequestError):
            fails.matcher.take(9)  # from now on it tells nothing else
        async with (
            peer(SamplingPeer(steps=steps)) as lost,
            peer(SamplingPeer(steps=None)) as other,
            asyncio.timeout(60),
        ):
            model = await load(lost, owner)
            for each in (kept, free, fails):
                model.submit(each)
            await owner.told.wait()
            await model.aclose()
            (error,) = sinks[2].errors
            assert "grammar" in str(error)
            second = await load(other, Owner())
            for each in owner.unfinished:
                second.submit(each)
            for sink in sinks:
                await sink.ended.wait()
            await second.aclose()
        assert sinks[0].tokens == kept_to_grammar(PROMPTS[0])
        assert sinks[1].tokens == expected(PROMPTS[1])

    asyncio.run(main())


END, MIN_TOKENS = 3, 6


def expected_to_end(prompt: Sequence[int], sampling: SamplingParameters) -> list[int]:
    """The tokens up to the first END, which `transformers` forbids before MIN_TOKENS."""
    forbid = MinNewTokensLengthLogitsProcessor(len(prompt), MIN_TOKENS, END, device="cpu")
    tokens = list(prompt)
    while tokens[-1] != END or len(tokens) == len(prompt):
        logits = logits_after(tokens)
        processed = forbid(torch.tensor([tokens]), torch.from_numpy(logits)[None])
        allowed = np.packbits(np.isfinite(processed[0].numpy()), bitorder="little")
        tokens.append(
            sample(
                logits,
                history=tokens,
                prompt_tokens=len(prompt),
                parameters=sampling,
                position=len(tokens),
                allowed=allowed,
            )
        )
    return tokens[len(prompt) :]


@pytest.mark.parametrize("steps", [0, 3, 8])
def test_no_answer_ends_before_its_fewest_tokens_on_any_plan(steps: int) -> None:
    """The end token is the likeliest from the first token on."""
    sampling = replace(PARAMETERS, logit_bias={END: 50.0}, min_tokens=MIN_TOKENS)

    async def main() -> None:
        owner, sinks = Owner(), [Results() for _prompt in PROMPTS]
        async with (
            peer(SamplingPeer(steps=steps)) as lost,
            peer(SamplingPeer(steps=None)) as other,
            asyncio.timeout(60),
        ):
            model = await load(lost, owner)
            for prompt, sink in zip(PROMPTS, sinks, strict=True):
                model.submit(
                    asked(prompt, sink, new_tokens=40, sampling=sampling, end_ids=frozenset({END}))
                )
            await owner.told.wait()
            await model.aclose()
            second = await load(other, Owner())
            for each in owner.unfinished:
                second.submit(each)
            for sink in sinks:
                await sink.ended.wait()
            await second.aclose()
        found = [sink.tokens for sink in sinks]
        assert found == [expected_to_end(prompt, sampling) for prompt in PROMPTS]
        assert {(len(tokens), sink.end) for tokens, sink in zip(found, sinks, strict=True)} == {
            (MIN_TOKENS + 1, "stop")
        }

    asyncio.run(main())


def test_what_comes_after_the_end_goes_back_at_once() -> None:
    async def main() -> None:
        owner = Owner()
        async with peer(SamplingPeer(steps=None)) as address:
            model = await load(address, owner)
            await model.aclose()
            late = request((1,), Results())
            model.submit(late)
            assert owner.unfinished == [late]
            assert owner.failure is model.failure

    asyncio.run(main())


def test_a_request_that_never_fits_is_told_so() -> None:
    async def main() -> None:
        async with peer(SamplingPeer(steps=None)) as address:
            model = await load(address, Owner())
            sink = Results()
            model.submit(request((1,) * 200, sink))
            await sink.ended.wait()
            (error,) = sink.errors
            assert isinstance(error, RequestError)
            assert "212 tokens never fit into 200" in str(error)
            await model.aclose()

    asyncio.run(main())


def test_a_defect_of_ours_leaves_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fall_over(_state: SchedulingState, _events: Sequence[object]) -> Orders:
        raise KeyError("lost")

    async def main() -> None:
        owner = Owner()
        async with peer(SamplingPeer(steps=None)) as address, asyncio.timeout(60):
            model = await load(address, owner)
            monkeypatch.setattr(run, "decide", fall_over)
            late = request((1,), Results())
            model.submit(late)
            await owner.told.wait()
            await model.aclose()
        assert owner.unfinished == [late]
        assert "the coordinator failed (KeyError('lost')); load the model again" in str(
            owner.failure
        )

    asyncio.run(main())
    assert "deciding on the next step failed" in caplog.text


class Reloads:
    """A `Reload` that follows a script: errors are raised, addresses are loaded."""

    def __init__(self, *script: EdgeError | str) -> None:
        self._script = iter(script)
        self.lost: list[frozenset[str]] = []
        self.under_way = asyncio.Event()
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()

    async def __call__(self, lost: Collection[str], on_end: OnEnd) -> PlanRun:
        self.lost.append(frozenset(lost))
        self.under_way.set()
        await self.may_go_on.wait()
        each = next(self._script)
        if isinstance(each, EdgeError):
            raise each
        return await load(each, on_end)


async def lasting(address: str, reload: Reloads) -> RunningModel:
    model = RunningModel(reload)
    model.begin(await load(address, model.ended))
    return model


def gone(name: str) -> PeerLostError:
    return PeerLostError(name, "it closed the connection")


def test_a_model_outlives_its_plans() -> None:
    """Also where the second is lost, and where loading failed in between."""

    async def main() -> None:
        replies = [Results() for _prompt in PROMPTS]
        async with (
            peer(SamplingPeer(steps=3)) as first,
            peer(SamplingPeer(steps=4)) as second,
            peer(SamplingPeer(steps=None)) as third,
            asyncio.timeout(60),
        ):
            reload = Reloads(second, gone("somebody"), third)
            model = await lasting(first, reload)
            for prompt, reply in zip(PROMPTS, replies, strict=True):
                model.submit(request(prompt, reply))
            for reply in replies:
                await reply.ended.wait()
            assert len(model.recoveries) == 2
            assert {recovery.requests > 0 for recovery in model.recoveries} == {True}
            lost = frozenset({"d0"})
            assert reload.lost == [lost, lost, lost | {"somebody"}]
            assert not model.is_recovering
            await model.aclose()
        assert [reply.tokens for reply in replies] == [expected(prompt) for prompt in PROMPTS]

    asyncio.run(main())


def test_what_cannot_go_on_says_why() -> None:
    async def main() -> None:
        reply, later = Results(), Results()
        async with peer(SamplingPeer(steps=2)) as first, asyncio.timeout(60):
            model = await lasting(first, Reloads(CapacityError("c lacks 5 GiB")))
            model.submit(request(PROMPTS[0], reply))
            await reply.ended.wait()
            (error,) = reply.errors
            assert isinstance(error, PeerLostError)
            assert "odd" in str(error)
            assert "it could not go on without: c lacks 5 GiB" in str(error)
            model.submit(request(PROMPTS[1], later))
            assert later.errors == [error]
            assert model.failure is error
            await model.aclose()

    asyncio.run(main())


def test_losses_without_end_are_given_up() -> None:
    """A request at which every plan ends must not load plans for ever."""

    async def main() -> None:
        reply = Results()
        losses = [gone("x")] * MOST_LOSSES_WITHOUT_A_TOKEN
        async with peer(SamplingPeer(steps=0)) as first, asyncio.timeout(60):
            reload = Reloads(*losses)
            model = await lasting(first, reload)
            model.submit(request(PROMPTS[0], reply))
            await reply.ended.wait()
            assert len(reply.errors) == 1
            assert len(reload.lost) == MOST_LOSSES_WITHOUT_A_TOKEN
            await model.aclose()

    asyncio.run(main())


@pytest.mark.parametrize(
    "error", [gone("x"), PeerError("x", "it is broken"), NetworkError("nobody answers")]
)
def test_a_model_that_nobody_asks_is_not_loaded_for_ever(error: EdgeError) -> None:
    async def main() -> None:
        async with peer(SamplingPeer(steps=None)) as first, asyncio.timeout(60):
            model = await lasting(first, Reloads(*[error] * 100))
            assert model._run is not None
            model._run.fail(gone("odd"))
            while model.failure is None:  # noqa: ASYNC110  nobody is told
                await asyncio.sleep(0)
            assert str(error) in str(model.failure)
            await model.aclose()

    asyncio.run(main())


def test_each_loss_of_a_model_that_nobody_asks_is_the_first() -> None:
    async def main() -> None:
        async with peer(SamplingPeer(steps=None)) as first, asyncio.timeout(60):
            losses = 2 * MOST_LOSSES_WITHOUT_A_TOKEN
            model = await lasting(first, Reloads(*[first] * losses))
            for number in range(losses):
                assert model._run is not None
                model._run.fail(gone("odd"))
                while len(model.recoveries) == number:  # noqa: ASYNC110  nobody is told
                    await asyncio.sleep(0)
            await model.aclose()

    asyncio.run(main())


def test_who_failed_is_named_once() -> None:
    async def main() -> None:
        async with peer(SamplingPeer(steps=None)) as first, asyncio.timeout(60):
            model = await lasting(first, Reloads(CapacityError("c lacks 5 GiB")))
            assert model._run is not None
            model._run.fail(PeerError("odd", "it is broken"))
            while model.failure is None:  # noqa: ASYNC110  nobody is told
                await asyncio.sleep(0)
            told = "peer odd: it is broken; and it could not go on without: c lacks 5 GiB"
            assert str(model.failure) == told
            await model.aclose()

    asyncio.run(main())


@pytest.mark.parametrize("closes", [True, False])
def test_while_it_is_loaded_anew(closes: bool) -> None:
    """New requests wait, cancelled ones are forgotten, and closing ends all of it."""

    async def main() -> None:
        kept, cancelled, new = Results(), Results(), Results()
        async with (
            peer(SamplingPeer(steps=2)) as first,
            peer(SamplingPeer(steps=None)) as second,
            asyncio.timeout(60),
        ):
            reload = Reloads(second)
            reload.may_go_on.clear()
            model = await lasting(first, reload)
            submitted = [request(PROMPTS[0], kept), request(PROMPTS[1], cancelled)]
            for each in submitted:
                model.submit(each)
            await reload.under_way.wait()
            assert model.is_recovering
            model.cancel(submitted[1].id)
            model.submit(request(PROMPTS[2], new))
            if closes:
                await model.aclose()
                assert [len(each.errors) for each in (kept, cancelled, new)] == [1, 0, 1]
                assert isinstance(kept.errors[0], RequestError)
                return
            reload.may_go_on.set()
            await kept.ended.wait()
            await new.ended.wait()
            assert (kept.tokens, new.tokens) == (expected(PROMPTS[0]), expected(PROMPTS[2]))
            assert not cancelled.ended.is_set()
            await model.aclose()

    asyncio.run(main())
