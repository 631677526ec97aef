"""Replies on the caller's own event loop: real peers, real sockets, no thread in between."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

import edge
from tests.multiprocess.conftest import LONG_CONTEXT
from tests.support.checkpoints import TinyCheckpoint
from tests.support.plans import make_plan

Checkpoints = Callable[..., TinyCheckpoint]


@pytest.fixture(scope="module")
def peers() -> Iterator[list[edge.PeerInfo]]:
    with edge.Cluster.local(peers=2, threads=1) as cluster:
        yield list(cluster.peers)


@contextlib.asynccontextmanager
async def endless(
    peers: list[edge.PeerInfo], checkpoint: TinyCheckpoint
) -> AsyncIterator[edge.AsyncModel]:
    async with (
        await edge.AsyncCluster.connect(peers) as cluster,
        await cluster.load(
            checkpoint.path,
            dtype="float32",
            plan=make_plan(checkpoint.spec, "tensor_2", model=checkpoint.path.name),
            context_tokens=LONG_CONTEXT,
            concurrency=4,
        ) as model,
    ):
        yield model


async def until_free(model: edge.AsyncModel, checkpoint: TinyCheckpoint) -> None:
    """A cancelled reply is gone: the model answers another, alone again."""
    prompt = checkpoint.prompt(4)
    reply = await model.generate(prompt, max_new_tokens=4)
    assert list(reply.token_ids) == checkpoint.greedy(prompt, 4)
    assert not model._held.running.answers


def test_local_peers_a_load_and_a_reply(tiny_checkpoint: Checkpoints) -> None:
    checkpoint = tiny_checkpoint("llama")
    prompt = checkpoint.prompt(5)

    async def main() -> list[int]:
        async with await edge.AsyncCluster.local(
            peers=2, threads=1, model_memory="16MiB"
        ) as cluster:
            assert (await cluster.propose(checkpoint.path, dtype="float32")).plan.devices
            async with await cluster.load(checkpoint.path, dtype="float32") as model:
                rows = await model.logits(prompt)
                assert rows.shape == (5, model.vocab_size)
                tokens = [token async for token in model.stream(prompt, max_new_tokens=8)]
                assert [token.finish_reason for token in tokens] == [None] * 7 + ["length"]
                assert await model.measure()
        with pytest.raises(edge.RequestError, match="the model is closed; load it again"):
            await model.generate(prompt)
        return [token.token_id for token in tokens]

    assert asyncio.run(main()) == checkpoint.greedy(prompt, 8)


def test_several_streams_at_once_on_one_loop(
    peers: list[edge.PeerInfo], endless_checkpoint: TinyCheckpoint
) -> None:
    """They are under way together: each waits for a token of every other."""
    prompts = [endless_checkpoint.prompt(3 + number) for number in range(3)]

    async def main() -> None:
        async with endless(peers, endless_checkpoint) as model:
            everyone = asyncio.Barrier(len(prompts))

            async def read(prompt: list[int]) -> tuple[int, ...]:
                stream = model.stream(prompt, max_new_tokens=12)
                await anext(stream)
                await everyone.wait()
                async for _token in stream:
                    pass
                return stream.reply().token_ids

            replies = await asyncio.gather(*(read(prompt) for prompt in prompts))
            expected = [endless_checkpoint.greedy(prompt, 12) for prompt in prompts]
            assert [list(reply) for reply in replies] == expected

    asyncio.run(main())


def test_a_cancelled_task_cancels_its_reply(
    peers: list[edge.PeerInfo], endless_checkpoint: TinyCheckpoint
) -> None:
    async def main() -> None:
        async with endless(peers, endless_checkpoint) as model:
            for count in (0, 1, 5):
                seen = asyncio.Event()

                async def read(count: int = count, seen: asyncio.Event = seen) -> None:
                    stream = model.stream([1, 2], max_new_tokens=LONG_CONTEXT - 2)
                    for _ in range(count):
                        await anext(stream)
                    seen.set()
                    async for _token in stream:
                        pass

                task = asyncio.create_task(read())
                await seen.wait()
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                await until_free(model, endless_checkpoint)
            whole = asyncio.create_task(model.generate([1, 2], max_new_tokens=LONG_CONTEXT - 2))
            await asyncio.sleep(0)
            whole.cancel()
            with pytest.raises(asyncio.CancelledError):
                await whole
            await until_free(model, endless_checkpoint)

    asyncio.run(main())


def test_leaving_the_loop_early_cancels_the_reply(
    peers: list[edge.PeerInfo], endless_checkpoint: TinyCheckpoint
) -> None:
    async def main() -> None:
        async with endless(peers, endless_checkpoint) as model:
            async for token in model.stream([1, 2], max_new_tokens=LONG_CONTEXT - 2):
                assert token.finish_reason is None
                break
            gc.collect()
            await until_free(model, endless_checkpoint)
            async with model.stream([1, 2], max_new_tokens=LONG_CONTEXT - 2) as stream:
                await anext(stream)
                with pytest.raises(edge.RequestError, match="not finished"):
                    stream.reply()
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
            await until_free(model, endless_checkpoint)
            model.stream([1, 2], max_new_tokens=LONG_CONTEXT - 2)  # dropped before it has begun
            await until_free(model, endless_checkpoint)

    asyncio.run(main())


def test_a_second_task_is_told_that_the_stream_is_read(
    peers: list[edge.PeerInfo], endless_checkpoint: TinyCheckpoint
) -> None:
    async def main() -> None:
        async with endless(peers, endless_checkpoint) as model:
            stream = model.stream([1, 2], max_new_tokens=20)
            first = asyncio.create_task(anext(stream))
            await asyncio.sleep(0)
            with pytest.raises(edge.RequestError, match="another task reads this stream"):
                await anext(stream)
            assert (await first).finish_reason is None
            assert len([token async for token in stream]) == 19

    asyncio.run(main())


def test_closing_the_model_ends_its_replies(
    peers: list[edge.PeerInfo], endless_checkpoint: TinyCheckpoint
) -> None:
    async def main() -> None:
        async with endless(peers, endless_checkpoint) as model:
            stream = model.stream([1, 2], max_new_tokens=LONG_CONTEXT - 2)
            await anext(stream)
            await model.aclose()
            with pytest.raises(edge.RequestError, match="the model is closed"):
                async for _token in stream:
                    pass
            for call in (model.measure, model.check):
                with pytest.raises(edge.RequestError, match="the model is closed; load it again"):
                    await call()

    asyncio.run(main())


def test_nothing_is_left_of_peers_that_were_given_up() -> None:
    """Cancelled while daemons start: they end; fixtures see that none is left."""

    async def main() -> None:
        starting = asyncio.create_task(edge.AsyncCluster.local(peers=2, threads=1))
        await asyncio.sleep(0)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting

    asyncio.run(main())
