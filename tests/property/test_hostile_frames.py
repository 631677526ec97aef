"""Whatever frame arrives is refused or understood: by the decoder, and by a peer that lives on."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.protocol import messages
from edge.protocol.client import PeerClient
from tests.support.hostile_talks import attack, bother, check_free, say, talk
from tests.support.mutated_frames import try_decoder
from tests.support.null_peers import null_peers

TALKS = 60
BOTHERED = 400


@settings(max_examples=1000)
@given(seed=st.integers(0, 2**64))
def test_the_decoder_refuses_or_understands(seed: int) -> None:
    assert try_decoder(seed) in ("frame", "record", "accepted")


def test_a_peer_lives_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with null_peers(tmp_path, 1, kv_disk_bytes=1 << 20) as (daemon,):
            address = daemon.resources.addresses[0]
            frames = talk(address)
            client = await PeerClient.connect(address, None)
            await client.call(messages.SetMemory(bytes=4 << 30))
            free_bytes = (await client.call(messages.Describe())).free_bytes
            await client.aclose()
            heard = await say(address, frames)
            # A peer that computes nothing has observed nothing, and says so.
            assert heard.count("failed") == 1
            assert heard.count("ok") == sum("call" in frame.header for frame in frames) - 1
            for number in range(TALKS):
                async with asyncio.timeout(60):
                    await attack(address, frames, random.Random(number))
                    if number % 10 == 0:
                        await check_free(daemon, free_bytes)
            await bother(address, frames, BOTHERED, random.Random(TALKS))
            await check_free(daemon, free_bytes)

    asyncio.run(main())
    assert caplog.messages == [], "what is refused is not our failure"
