"""Requests over real peers that compute nothing: every reply is the one it would be alone.

All are submitted before the loop runs on, so they overlap whatever the machine is busy with.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from edge.answers.answer import Answer
from edge.answers.copies import AnswerCopies, KvLayout
from edge.backends.null.made_up import logits_after
from edge.demos.bundled import MODEL
from edge.errors import CapacityError, PeerError, PeerLostError
from edge.kernels.sampling.parameters import SamplingParameters
from edge.models.spec import ModelSpec
from edge.protocol.peer_info import describe_peer
from edge.protocol.step import StepLimits
from edge.runs.run import PlanRun
from edge.weights.checkpoint import Checkpoint
from tests.support.null_peers import (
    TOKEN_BYTES,
    expected_tokens,
    load,
    null_peers,
    request,
)
from tests.support.scripted_peers import Owner, Results
from tests.support.scripted_peers import asked as asked_for

SEEDED = SamplingParameters(
    temperature=1.1,
    repetition_penalty=1.7,
    frequency_penalty=0.8,
    presence_penalty=0.4,
    logit_bias={5: 2.0, 600: 3.0},
    top_p=0.9,
    seed=7,
)
PATIENCE_S = 120.0
"""Only a test that hangs takes as long."""


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    with Checkpoint.open(MODEL) as checkpoint:
        return checkpoint.spec


def limits(*, memory: int, disk: int = 0, context: int = 64, requests: int = 8) -> StepLimits:
    return StepLimits(
        context_tokens=context,
        chunk_tokens=16,
        requests=requests,
        cached_tokens=memory,
        disk_tokens=disk,
    )


def prompt(length: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(length).integers(3, 700, size=length).tolist())


async def finish(model: PlanRun, requests: Sequence[Answer]) -> list[Results]:
    """Submit them all at once; their results."""
    sinks: list[Results] = []
    for each in requests:
        assert isinstance(each.sink, Results)
        sinks.append(each.sink)
        model.submit(each)
    async with asyncio.timeout(PATIENCE_S):
        for sink in sinks:
            await sink.ended.wait()
    return sinks


def replies(lengths: Sequence[int], new_tokens: int) -> list[Answer]:
    return [
        request(prompt(each), Results(), new_tokens=new_tokens, parameters=SEEDED)
        for each in lengths
    ]


@pytest.mark.parametrize(("layout", "count"), [("solo", 1), ("pipeline_2", 2), ("mixed_2x2", 4)])
def test_replies_at_once_are_those_of_replies_alone(
    layout: str, count: int, tmp_path: Path, spec: ModelSpec
) -> None:
    """More than fit: some wait, some join while others run on by themselves."""

    async def main() -> None:
        async with null_peers(tmp_path, count) as daemons:
            model = await load(daemons, layout, limits(memory=150), Owner(), tmp_path)
            lengths = (5, 40, 3, 17, 1)
            rows = Results()
            asked = [*replies(lengths, 20), asked_for(prompt(35), rows)]
            sinks = await finish(model, asked)
            await model.aclose()
        for length, sink in zip(lengths, sinks[:-1], strict=True):
            assert sink.tokens == expected_tokens(spec, prompt(length), 20, SEEDED)
            assert sink.end == "length"
        expected = [logits_after(spec, prompt(35)[:end]) for end in range(1, 36)]
        assert rows.found is not None
        np.testing.assert_array_equal(rows.found, expected)

    asyncio.run(main())


def test_copies_of_keys_and_values_go_with_the_reply(tmp_path: Path) -> None:
    """They are large, and who asked may hold on to the request."""

    async def main() -> None:
        form = KvLayout(layers={}, digests={}, is_rounded=False)
        async with null_peers(tmp_path, 1) as daemons:
            model = await load(daemons, "solo", limits(memory=150), Owner(), tmp_path)
            sink = Results()
            finished = request(prompt(5), sink, new_tokens=20, parameters=SEEDED)
            (cancelled,) = replies((7,), 20)
            for each in (finished, cancelled):
                model.submit(each)
                each.copies = AnswerCopies(form=form, first=0)
            model.cancel(cancelled.id)
            async with asyncio.timeout(PATIENCE_S):
                await sink.ended.wait()
            await model.aclose()
        assert cancelled.copies is None
        assert finished.copies is None

    asyncio.run(main())


@pytest.mark.parametrize(
    ("layout", "lengths", "new_tokens"),
    [("pipeline_2", (5, 20, 11, 1), 80), ("tensor_2", (5, 230, 20), 30)],
)
def test_requests_take_turns_in_memory(
    layout: str, lengths: tuple[int, ...], new_tokens: int, tmp_path: Path, spec: ModelSpec
) -> None:
    """Four over memory for two; or among them one that is longer than memory."""

    async def main() -> None:
        async with null_peers(tmp_path, 2, kv_disk_bytes=1 << 24) as daemons:
            bounds = limits(memory=256, disk=1000, context=320)
            model = await load(daemons, layout, bounds, Owner(), tmp_path)
            sinks = await finish(model, replies(lengths, new_tokens))
            written = [each.kv_written_bytes for each in await model.measure()]
            await model.aclose()
        assert [sink.errors for sink in sinks] == [[]] * len(lengths)
        for length, sink in zip(lengths, sinks, strict=True):
            assert sink.tokens == expected_tokens(spec, prompt(length), new_tokens, SEEDED)
        assert all(written), "some left memory"

    asyncio.run(main())


def test_a_full_disk_makes_requests_wait_or_ends_one(tmp_path: Path, spec: ModelSpec) -> None:
    """The peer has less of it than the coordinator was told."""

    async def main() -> None:
        async with null_peers(tmp_path, 1, kv_disk_bytes=8 * TOKEN_BYTES) as daemons:
            bounds = limits(memory=256, disk=1000, context=320)
            model = await load(daemons, "solo", bounds, Owner(), tmp_path)
            waiting = await finish(model, replies((40, 41, 42), 70))
            first, last = await finish(model, replies((10, 11), 120))
            (long,) = await finish(model, replies((270,), 20))
            await model.aclose()
        for length, sink in zip((40, 41, 42), waiting, strict=True):
            assert sink.tokens == expected_tokens(spec, prompt(length), 70, SEEDED)
        assert first.tokens == expected_tokens(spec, prompt(10), 120, SEEDED)
        for sink in (last, long):
            (error,) = sink.errors
            assert isinstance(error, CapacityError)
            assert str(error).startswith("peer null-0: ")

    asyncio.run(main())


def test_a_prompt_that_every_shard_has_is_not_computed_again(
    tmp_path: Path, spec: ModelSpec
) -> None:
    async def main() -> None:
        async with null_peers(tmp_path, 2, kv_disk_bytes=1 << 24) as daemons:
            bounds = limits(memory=256, disk=1000, context=320)
            model = await load(daemons, "pipeline_2", bounds, Owner(), tmp_path)
            steps = []
            for _ in range(2):
                (sink,) = await finish(model, replies((50,), 5))
                assert sink.tokens == expected_tokens(spec, prompt(50), 5, SEEDED)
                steps.append([each.prompt.steps for each in await model.measure()])
            await model.aclose()
        assert steps[0] == [4, 4]
        # Of the first reply that is on disk which the disk kept up with: the same for all shards.
        assert steps[1][0] == steps[1][1] < 4

    asyncio.run(main())


@pytest.mark.parametrize("lost", [0, 1])
def test_what_a_lost_plan_leaves_goes_on_elsewhere(
    lost: int, tmp_path: Path, spec: ModelSpec
) -> None:
    """One peer of two goes away amid replies; what is left of them runs on the other alone."""

    async def main() -> None:
        owner = Owner()
        async with null_peers(tmp_path, 2) as daemons:
            model = await load(daemons, "pipeline_2", limits(memory=400), owner, tmp_path)
            lengths = (5, 33, 1)
            asked = replies(lengths, 30)
            for each in asked:
                model.submit(each)
            sinks = [each.sink for each in asked if isinstance(each.sink, Results)]
            async with asyncio.timeout(PATIENCE_S):
                await sinks[0].begun.wait()
                await daemons[lost].aclose()
                await owner.told.wait()
                await model.aclose()
            assert isinstance(owner.failure, PeerLostError)
            assert owner.failure.peer == f"null-{lost}"
            assert owner.unfinished == asked
            assert not any(sink.errors for sink in sinks), "the owner decides"
            survivor = [daemons[1 - lost]]
            second = await load(survivor, "solo", limits(memory=400), Owner(), tmp_path)
            await finish(second, asked)
            await second.aclose()
        for length, sink in zip(lengths, sinks, strict=True):
            assert sink.tokens == expected_tokens(spec, prompt(length), 30, SEEDED)
            assert sink.end == "length"

    asyncio.run(main())


def test_a_peer_that_goes_away_while_nothing_runs(tmp_path: Path) -> None:
    async def main() -> None:
        owner = Owner()
        async with null_peers(tmp_path, 2) as daemons:
            model = await load(daemons, "pipeline_2", limits(memory=100), owner, tmp_path)
            await daemons[0].aclose()
            async with asyncio.timeout(PATIENCE_S):
                await owner.told.wait()
            assert isinstance(owner.failure, PeerLostError)
            (late,) = replies((3,), 3)
            model.submit(late)
            assert owner.unfinished == [late]
            await model.aclose()
            assert daemons[1].resources.sessions == {}, "the other is free again"

    asyncio.run(main())


def test_a_peer_that_leaves_says_so_and_waits_for_its_sessions(tmp_path: Path) -> None:
    async def main() -> None:
        owner = Owner()
        async with null_peers(tmp_path, 2) as daemons:
            model = await load(daemons, "pipeline_2", limits(memory=400), owner, tmp_path)
            (asked,) = replies((5,), 390)
            model.submit(asked)
            async with asyncio.timeout(PATIENCE_S):
                await daemons[0].leave(within_s=PATIENCE_S)
                assert daemons[0].resources.sessions == {}
                await owner.told.wait()
                await model.aclose()
            assert str(owner.failure) == ("peer null-0: its user has stopped it")
            assert owner.unfinished == [asked]
            left, stays = [
                await describe_peer(daemon.resources.addresses[0], None) for daemon in daemons
            ]
            assert (left.health, left.free_bytes, stays.health) == ("leaving", 0, "alive")
            with pytest.raises(PeerError, match="peer null-0: its user has stopped it"):
                await load(daemons[:1], "solo", limits(memory=400), Owner(), tmp_path)

    asyncio.run(main())


def test_a_peer_leaves_without_who_does_not_let_it_go(tmp_path: Path) -> None:
    async def main() -> None:
        owner = Owner()
        async with null_peers(tmp_path, 1) as daemons:
            model = await load(daemons, "solo", limits(memory=400), owner, tmp_path)
            await daemons[0].leave(within_s=0)
            assert daemons[0].resources.sessions
            await daemons[0].aclose()
            await model.aclose()
            assert isinstance(owner.failure, PeerLostError)

    asyncio.run(main())
