"""Requests with a common beginning, on real peers that compute nothing: it is computed once."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge.backends.null.program import NullProgram
from edge.demos.bundled import MODEL
from edge.engine.distributed_sampling import DistributedSampling
from edge.kernels.sampling.parameters import SamplingParameters
from edge.membership.membership import Membership, credentials
from edge.memory.ledger import Use
from edge.protocol.step import StepLimits
from edge.runs.run import PlanRun
from edge.scheduling.orders import Work
from edge.transport import Credentials
from edge.weights.checkpoint import Checkpoint
from tests.support.null_peers import expected_tokens, load, null_peers, request
from tests.support.scripted_peers import Owner, Results

PATIENCE_S = 120.0
GREEDY = SamplingParameters()


def tokens(seed: int, count: int) -> list[int]:
    return [int(each) for each in np.random.default_rng(seed).integers(3, 700, size=count)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model, with a longer context."""
    folder = Path(shutil.copytree(MODEL, tmp_path_factory.mktemp("model") / MODEL.name))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))
    return folder


async def prompt_work(
    path: Path, folder: Path, layout: str, prompts: Sequence[Sequence[int]], limits: StepLimits
) -> int:
    """Tokens of these prompts that were computed; all are asked at once, and get two tokens."""
    async with null_peers(folder, 2) as daemons:
        model = await load(daemons, layout, limits, Owner(), folder, path=path)
        sinks = []
        for prompt in prompts:
            sinks.append(Results())
            model.submit(request(prompt, sinks[-1], new_tokens=2, parameters=GREEDY))
        async with asyncio.timeout(PATIENCE_S):
            for sink in sinks:
                await sink.ended.wait()
        await model.aclose()
    with Checkpoint.open(path) as checkpoint:
        for prompt, sink in list(zip(prompts, sinks, strict=True))[:: max(1, len(prompts) // 4)]:
            assert sink.tokens == expected_tokens(checkpoint.spec, prompt, 2, GREEDY)
    return model.work.prompt_tokens


@pytest.mark.parametrize("layout", ["pipeline_2", "tensor_2"])
def test_a_beginning_of_a_thousand_tokens_is_computed_once_for_32_requests(
    path: Path, layout: str, tmp_path: Path
) -> None:
    """Four of them have room at once."""
    tails = [10 + 3 * number for number in range(32)]
    prompts = [tokens(0, 1000) + tokens(1 + number, tail) for number, tail in enumerate(tails)]
    limits = StepLimits(context_tokens=1120, chunk_tokens=256, requests=4, cached_tokens=4 * 1120)
    work = asyncio.run(prompt_work(path, tmp_path, layout, prompts, limits))
    assert work == 1000 + sum(tails)


LONG = StepLimits(context_tokens=2000, chunk_tokens=16, requests=4, cached_tokens=4 * 2000)


@pytest.mark.parametrize("layout", ["pipeline_2", "tensor_2"])
def test_of_a_prompt_that_nobody_waits_for_no_further_step_is_given_out(
    path: Path, layout: str, tmp_path: Path
) -> None:
    async def main() -> None:
        async with null_peers(tmp_path, 2) as daemons:
            model = await load(daemons, layout, LONG, Owner(), tmp_path, path=path)
            long = request(tokens(7, 1900), Results(), new_tokens=2, parameters=GREEDY)
            model.submit(long)
            while not model.work.steps:  # noqa: ASYNC110  daemons of this loop go on
                await asyncio.sleep(0)
            model.cancel(long.id)
            given = model.work
            other = Results()
            model.submit(request(tokens(9, 20), other, new_tokens=2, parameters=GREEDY))
            async with asyncio.timeout(PATIENCE_S):
                await other.ended.wait()
            await model.aclose()
        assert 0 < given.prompt_tokens < 1900
        assert model.work == given + Work(prompt_tokens=20, answer_tokens=2, steps=3)

    asyncio.run(main())


def test_of_an_answer_that_nobody_reads_the_token_under_way_is_the_last(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step waits here to be let, so that the peer is in the middle of one when it is told."""
    steps = threading.Semaphore(0)
    forward, cancel = NullProgram.forward, DistributedSampling.cancel
    told = asyncio.Event()

    def waiting(self: NullProgram, *given: Any) -> Any:
        assert steps.acquire(timeout=PATIENCE_S)
        return forward(self, *given)

    def telling(self: DistributedSampling, request: str) -> None:
        cancel(self, request)
        told.set()

    class Leaves(Results):
        """Has heard enough with the first token."""

        def token(self, *told: Any) -> bool:
            super().token(*told)
            return True

    async def main() -> None:
        async with null_peers(tmp_path, 1) as daemons:
            model = await load(daemons, "solo", LONG, Owner(), tmp_path, path=path)
            monkeypatch.setattr(NullProgram, "forward", waiting)
            monkeypatch.setattr(DistributedSampling, "cancel", telling)
            left, other = Leaves(), Results()
            model.submit(request(tokens(8, 20), left, new_tokens=1900, parameters=GREEDY))
            steps.release(2)  # two chunks
            async with asyncio.timeout(PATIENCE_S):
                await left.begun.wait()
                assert model.work == Work(prompt_tokens=20, answer_tokens=1, steps=3)
                await told.wait()
                steps.release(1900)
                model.submit(request(tokens(9, 20), other, new_tokens=2, parameters=GREEDY))
                await other.ended.wait()
            await model.aclose()
        assert len(left.tokens) == 1
        assert model.work == Work(prompt_tokens=40, answer_tokens=1 + 1 + 2, steps=3 + 3)

    asyncio.run(main())


@pytest.mark.parametrize("layout", ["pipeline_2", "tensor_2"])
def test_who_has_another_salt_finds_nothing(path: Path, layout: str, tmp_path: Path) -> None:
    """Neither of one that is computed at the same time, nor of one that is over, nor of what an
    earlier plan has left, in memory or on disk."""
    prompt, limits = tokens(0, 500), replace(LIMITS, requests=4, cached_tokens=8 * 640)

    async def main() -> None:
        async with null_peers(tmp_path, 2, kv_disk_bytes=1 << 24) as daemons:
            model = await load(daemons, layout, limits, Owner(), tmp_path, path=path)

            async def found(*salts: str) -> list[int]:
                sinks = [Results() for _ in salts]
                asked = [
                    request(prompt, sink, new_tokens=2, parameters=GREEDY, salt=salt)
                    for sink, salt in zip(sinks, salts, strict=True)
                ]
                for each in asked:
                    model.submit(each)
                async with asyncio.timeout(PATIENCE_S):
                    for sink in sinks:
                        await sink.ended.wait()
                with Checkpoint.open(path) as checkpoint:
                    wanted = expected_tokens(checkpoint.spec, prompt, 2, GREEDY)
                assert [sink.tokens for sink in sinks] == [wanted] * len(sinks)
                return [each.found_tokens for each in asked]

            assert await found("a", "b") == [0, 0]
            assert await found("", "c") == [0, 0]
            assert min(await found("a", "b", "")) > 400
            await model.aclose()
            model = await load(daemons, layout, limits, Owner(), tmp_path, path=path)
            assert await found("d", "a", "e") == [0, 496, 0]
            await model.aclose()

    asyncio.run(main())


def test_requests_that_begin_alike_come_one_after_the_other(path: Path, tmp_path: Path) -> None:
    """Eight beginnings, of which two have room, and each is asked for in turn."""
    prompts = [tokens(number % 8, 200) + tokens(100 + number, 10) for number in range(32)]
    limits = StepLimits(context_tokens=216, chunk_tokens=64, requests=2, cached_tokens=2 * 216)
    work = asyncio.run(prompt_work(path, tmp_path, "pipeline_2", prompts, limits))
    assert work == 8 * 200 + 32 * 10


LIMITS = StepLimits(context_tokens=640, chunk_tokens=64, requests=2, cached_tokens=2 * 640)


def shown(membership: Membership) -> Credentials:
    return credentials(lambda: membership)


async def ask(model: PlanRun, prompt: Sequence[int], path: Path) -> int:
    """So many tokens of the prompt are found; the answer is as if none were, and the model is
    closed."""
    sink = Results()
    asked = request(prompt, sink, new_tokens=2, parameters=GREEDY)
    model.submit(asked)
    async with asyncio.timeout(PATIENCE_S):
        await sink.ended.wait()
        await model.aclose()
    with Checkpoint.open(path) as checkpoint:
        assert sink.tokens == expected_tokens(checkpoint.spec, prompt, 2, GREEDY)
    assert model.work.prompt_tokens == len(prompt) - asked.found_tokens
    return asked.found_tokens


@pytest.mark.parametrize("layout", ["pipeline_2", "tensor_2"])
def test_what_a_plan_has_read_is_there_for_the_next(
    path: Path, layout: str, tmp_path: Path
) -> None:
    """Without a disk, and as long as nobody needs its memory."""
    prompt = tokens(0, 500)

    async def main() -> None:
        async with null_peers(tmp_path, 2) as daemons:
            free_bytes = [each.resources.ledger.free_bytes for each in daemons]

            async def again(prompt: Sequence[int], layout: str = layout) -> int:
                model = await load(daemons, layout, LIMITS, Owner(), tmp_path, path=path)
                found = await ask(model, prompt, path)
                assert [each.resources.ledger.free_bytes for each in daemons] == free_bytes
                return found

            assert await again(prompt) == 0
            assert all(each.resources.describe().kv_beginnings_bytes for each in daemons)
            assert await again([*prompt, *tokens(1, 30)]) == 496
            assert await again([*prompt[:100], *tokens(2, 30)]) == 96
            assert await again(prompt, layout="solo") == 0, "another plan computes other bits"
            resources = daemons[1].resources
            await resources.reserve("all", Use(weight_bytes=free_bytes[1]))
            assert resources.describe().kv_beginnings_bytes == 0
            resources.release("all")
            assert await again(prompt) == 0, "what one shard has lost, all compute again"
            assert await again(prompt) == 496

    asyncio.run(main())


def test_what_one_device_has_asked_no_other_finds(path: Path, tmp_path: Path) -> None:
    """Unless it shares that, and the other one names it."""
    home = Membership.founded("home")
    assert home.authority is not None
    members = [
        Membership.enrolled(home.authority, home.tag_key, name) for name in ("kitchen", "attic")
    ]
    one, other = [shown(each) for each in members]

    async def main() -> None:
        async with null_peers(tmp_path, 1, membership=home) as daemons:

            async def again(
                who: Credentials,
                prompt: Sequence[int],
                *,
                shares: bool = False,
                finds: tuple[str, ...] = (),
            ) -> int:
                model = await load(
                    daemons,
                    "solo",
                    LIMITS,
                    Owner(),
                    tmp_path,
                    path=path,
                    credentials=who,
                    share_prefixes=shares,
                    prefixes_of=finds,
                )
                return await ask(model, prompt, path)

            kept, left, named = (tokens(number, 100) for number in range(3))
            assert await again(one, kept) == 0
            assert await again(other, kept) == 0
            assert await again(one, kept) == 96
            trusted = members[0].identity.id[:16]
            assert await again(other, kept, finds=(trusted,)) == 0, "it was not shared"
            assert await again(one, left, shares=True) == 0
            assert await again(other, left, shares=True) == 0, "who has shared it was not named"
            assert await again(other, left, shares=True) == 96
            assert await again(one, named, shares=True) == 0
            assert await again(other, named, finds=(trusted,)) == 96

    asyncio.run(main())
