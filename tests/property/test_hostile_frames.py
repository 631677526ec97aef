"""Whatever frame arrives is refused or understood: by the decoder, and by a peer that lives on."""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.protocol import peer_frames
from edge.protocol.client import PeerClient
from tests.support.hostile_talks import (
    Talk,
    attack,
    bother,
    check_free,
    hostile_member,
    kept_frames,
    measures,
    say,
    talk,
)
from tests.support.kept_inputs import kept
from tests.support.mutated_frames import READ_AS, outcome, try_decoder

TALKS = 30
BOTHERED = 200


READ = "frame", "record", "accepted"


def test_frames_that_once_showed_more_are_refused_or_understood() -> None:
    found = [outcome(*each) for each in kept("frames", READ_AS)]
    assert found
    assert set(found) <= set(READ)


@settings(max_examples=400)
@given(seed=st.integers(0, 2**64))
def test_the_decoder_refuses_or_understands(seed: int) -> None:
    assert try_decoder(seed) in READ


def test_a_peer_lives_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with hostile_member(tmp_path) as (daemon, shown):
            address = daemon.resources.addresses[0]
            frames, seldom = talk(address), measures(address, daemon.resources.id)
            client = await PeerClient.connect(address, shown)
            await client.call(peer_frames.SetMemory(bytes=4 << 30))
            free_bytes = (await client.call(peer_frames.Describe())).free_bytes
            await client.aclose()
            heard = await say(address, frames, shown)
            assert heard.count("failed") == 2
            assert heard.count("ok") == sum("call" in frame.header for frame in frames) - 1
            assert set(await say(address, seldom[:-1], shown)) <= {"ok", "alive"}
            for number in range(TALKS):
                async with asyncio.timeout(60):
                    await attack(address, frames, random.Random(number), shown)
                    if number % 10 == 0:
                        await check_free(daemon, free_bytes, shown)
            await bother(address, frames, seldom, BOTHERED, random.Random(TALKS), shown)
            await check_free(daemon, free_bytes, shown)
            async with contextlib.aclosing(Talk(address, shown)) as told:
                answers = {await told.say(frame) for frame in kept_frames()}
            assert {"ok", "failed"} <= answers
            await check_free(daemon, free_bytes, shown)

    asyncio.run(main())
    assert caplog.messages == [], "what is refused is not our failure"
