"""Copies of a model on two daemons: requests meet where their beginning is, and none is lost with a
device."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

import edge
from edge.demos.bundled import MODEL
from edge.runs.copied_model import CopiedModel
from tests.multiprocess.test_server_clients import ANSWER, ASKED, request
from tests.support.checkpoints import TinyCheckpoint
from tests.support.processes import PATIENCE_S, Daemon, edge_process, start_together
from tests.support.processes import edge as run_edge

NEW_TOKENS = 180
"""Of an answer in whose middle a peer is lost."""


@pytest.fixture
def two(tmp_path: Path) -> Iterator[list[Daemon]]:
    starts = [
        partial(Daemon, tmp_path / name, "--no-announce", "--name", name)
        for name in ("left", "right")
    ]
    with start_together(*starts) as daemons:
        yield daemons


async def whole(stream: edge.AsyncReplyStream) -> edge.Reply:
    async for _ in stream:
        pass
    return stream.reply()


def ask(
    model: edge.AsyncModel, prompts: Sequence[Sequence[int]], tokens: int
) -> list[edge.AsyncReplyStream]:
    """Every second one is sampled."""
    return [
        model.stream(
            list(prompt),
            max_new_tokens=tokens,
            ignore_eos=True,
            temperature=number % 2,
            seed=number,
        )
        for number, prompt in enumerate(prompts)
    ]


def test_requests_that_begin_alike_meet_and_a_killed_peer_costs_no_token(
    two: list[Daemon], tiny_checkpoint: Callable[..., TinyCheckpoint]
) -> None:
    checkpoint = tiny_checkpoint("llama")
    beginnings = [checkpoint.prompt(length) for length in (48, 52)]
    prompts = [[*beginnings[number % 2], number + 5] for number in range(6)]

    async def main() -> None:
        async with (
            asyncio.timeout(PATIENCE_S),
            await edge.AsyncCluster.connect([daemon.address for daemon in two]) as cluster,
            await cluster.load(
                checkpoint.path, dtype="float32", copies=2, concurrency=8, context_tokens=256
            ) as model,
        ):
            front = model._held.running
            assert isinstance(front, CopiedModel)
            first = await asyncio.gather(*map(whole, ask(model, beginnings, 2)))
            assert [reply.statistics["found_tokens"] for reply in first] == [0, 0]
            assert [copy.answered for copy in front.copies] == [1, 1]
            before = await asyncio.gather(*map(whole, ask(model, prompts, NEW_TOKENS)))
            assert [copy.answered for copy in front.copies] == [4, 4]
            assert min(reply.statistics["found_tokens"] for reply in before) >= 40
            assert list(before[0].token_ids) == checkpoint.greedy(prompts[0], NEW_TOKENS)

            streams = ask(model, prompts, NEW_TOKENS)
            for stream in streams:
                await anext(stream)
            assert [len(copy.running.answers) for copy in front.copies] == [3, 3]
            lost, *_ = front.copies[0].devices
            await asyncio.to_thread({daemon.name: daemon for daemon in two}[lost].kill)
            after = await asyncio.gather(*map(whole, streams))
            assert [reply.token_ids for reply in after] == [reply.token_ids for reply in before]
            (recovery,) = model.recoveries
            assert recovery.requests == 3
            assert lost in recovery.reason

    asyncio.run(main())


def test_a_server_of_copies_and_what_a_plan_says_of_them(two: list[Daemon]) -> None:
    peers = [part for daemon in two for part in ("--peer", daemon.address)]
    told = run_edge("plan", MODEL, *peers, "--concurrency", 8, "--explain")
    assert told.code == 0, told
    assert "at 8 requests at once, 2 copies (" in " ".join(told.out.split())
    served = ("serve", MODEL, *peers, "--copies", "2", "--port", "0")
    with edge_process(*served, "--json") as process:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        bodies = [
            {"model": "default", "messages": ASKED, "temperature": 0, **more}
            for more in (
                {},
                {"stop": [ANSWER[5:8]]},
                {"response_format": {"type": "json_object"}, "max_tokens": 8},
            )
        ]
        with ThreadPoolExecutor(len(bodies)) as pool:
            ask = partial(request, url, "POST", "/v1/chat/completions")
            replies = [reply["choices"][0] for _, _, reply in pool.map(ask, bodies)]
        assert replies[0]["message"]["content"] == ANSWER
        assert replies[1]["message"]["content"] == ANSWER[:5]
        assert replies[2]["message"]["content"].lstrip().startswith("{")
        copies = request(url, "GET", "/api/cluster")[2]["copies"]
        assert {each["devices"][0] for each in copies} == {daemon.name for daemon in two}
        assert sum(each["answered"] for each in copies) == len(bodies)
        assert "Copies, with answers under way" in run_edge("top", url, "--once").out
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    for daemon in two:
        daemon.await_free()


def test_copies_that_fit_nowhere_are_told_with_what_helps(two: list[Daemon]) -> None:
    peers = [part for daemon in two for part in ("--peer", daemon.address)]
    told = run_edge("serve", MODEL, *peers, "--copies", "3", "--port", "0").sentence()
    assert "fits whole on 2 of 2 devices, and 3 copies were asked for" in told
    assert "ask for fewer copies" in told
    assert "give auto, or 1 to 64" in run_edge("serve", MODEL, "--copies", "many").sentence()
