"""Whatever frame arrives is refused or understood: by the decoder, and by a peer that lives on."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import transport
from edge.peer.daemon import PeerDaemon
from edge.protocol import messages
from edge.protocol.assignment import Assignment
from edge.protocol.client import PeerClient
from edge.protocol.fields import token_bytes
from edge.protocol.frame_codec import Call, to_frame
from edge.protocol.measurements import MemoryRate, Profile
from edge.protocol.step import SamplingTerms, Step, StepEntry, StepLimits
from edge.protocol.topology import Place
from edge.protocol.wire_rules import WireRules
from edge.weights.formats import weight_format
from kernels.sampling.parameters import SamplingParameters
from offload import Manifest, ManifestBuilder
from partition import Plan, Shard, Stage
from tests.support.mutated_frames import mutated_frame, try_decoder
from tests.support.null_peers import null_peers
from tests.support.specs import plain_spec
from transport import Frame, WireRule

TALKS = 150

SPEC = plain_spec(num_layers=2, hidden_size=32, ffn_columns=32, vocab_size=50)
WHOLE = Shard(device="d", heads=range(3), ffn_columns=range(32), vocab=range(50))


@settings(max_examples=3000)
@given(seed=st.integers(0, 2**64))
def test_the_decoder_refuses_or_understands(seed: int) -> None:
    assert try_decoder(seed) in ("frame", "record", "accepted")


def shard() -> tuple[Assignment, Manifest, dict[str, bytes]]:
    """All of a small model, and its weights in pieces: zeros."""
    assignment = Assignment(
        session="s",
        model=SPEC,
        plan=Plan(model="m", version=1, stages=(Stage(layers=range(2), shards=(WHOLE,)),)),
        stage=0,
        rank=0,
        weight_format=weight_format("int4", 32),
        manifest_digest="",
        weights_digest="w",
        kv_dtype="float32",
        limits=StepLimits(
            context_tokens=16, chunk_tokens=8, requests=2, cached_tokens=32, disk_tokens=32
        ),
        wire_rules=WireRules(sums=(WireRule(),), hops=()),
    )
    builder, layout = ManifestBuilder(), assignment.layout
    arrays: dict[str, NDArray[Any]] = {"embedding": np.zeros((50, 32), np.float32)}
    for matrix in layout.matrices:
        for array in assignment.weight_format.kind.arrays_of(matrix):
            arrays[f"{matrix.name}.{array.suffix}"] = np.zeros(array.shape, array.dtype)
    for vector in layout.vectors:
        arrays[vector.name] = np.zeros(sum(len(part) for _role, part in vector.parts), np.float32)
    pieces = {}
    for name, value in arrays.items():
        (piece,) = builder.add(name, value).pieces
        pieces[piece.digest] = value.tobytes()
    return assignment, builder.build(), pieces


def talk(address: str) -> list[Frame]:
    """What a coordinator sends that loads the shard and asks it once."""
    assignment, manifest, pieces = shard()
    digest = manifest.digest
    assignment = replace(assignment, manifest_digest=digest)
    prompt = StepEntry(request="r", position=0, tokens=(1, 2, 3), logit_rows=1)
    terms = SamplingTerms(sampling=SamplingParameters(), end_ids=frozenset({7}), max_new_tokens=4)
    sent: list[Any] = [
        messages.Describe(),
        messages.SetMemory(bytes=1 << 30),
        messages.Offer(manifest=manifest),
        *(messages.Piece(manifest=digest, digest=d, content=c) for d, c in pieces.items()),
        messages.Seal(manifest=digest),
        messages.Open(assignment=assignment, prefix_secret=bytes(32)),
        messages.Connect(session="s", places={(0, 0): Place(name="n", addresses=(address,))}),
        messages.MatchPrefix(session="s", request="r", prompt=token_bytes([1, 2, 3])),
        messages.Reserve(session="s", request="r", tokens=4),
        messages.RunStep(session="s", step=Step(entries=(prompt,), run=3), terms={"r": terms}),
        messages.YieldRun(session="s"),
        messages.SwapOut(session="s", request="r"),
        messages.Measure(session="s"),
        messages.Finish(session="s", request="r"),
        messages.Close(session="s"),
    ]
    return [
        to_frame(each.kind, each, call=number if isinstance(each, Call) else None)
        for number, each in enumerate(sent)
    ]


async def attack(address: str, frames: list[Frame], chance: random.Random) -> None:
    """One talk with one to three of its frames changed, left out or sent again."""
    frames = list(frames)
    for _ in range(chance.choice((1, 1, 2, 3))):
        at = chance.randrange(len(frames))
        frames[at : at + 1] = chance.choice(
            ([mutated_frame(frames[at], chance)], [mutated_frame(frames[at], chance)],
             [], [frames[at]] * 2, [frames[at], mutated_frame(frames[at], chance)])
        )  # fmt: skip
    await say(address, frames)


async def say(address: str, frames: list[Frame]) -> list[str]:
    """What kinds of answers come, until it is hung up on."""
    kinds = []
    channel = await transport.connect(address, credentials=None, hello={"name": "hostile"})
    try:
        for frame in frames:
            if frame.kind in (MemoryRate.kind, Profile.kind):
                continue
            await channel.send(frame)
            is_call = issubclass(messages.FRAMES[frame.kind], Call)
            while is_call and frame.header.get("call") is not None:
                answer = await channel.receive()
                kinds.append(answer.kind)
                if "call" in answer.header:
                    break
    except transport.TransportError:
        pass  # hung up on
    finally:
        await channel.aclose()
    return kinds


async def check_free(daemon: PeerDaemon, free_bytes: int) -> None:
    """The peer answers, and holds nothing of anybody's."""
    resources = daemon.resources
    while resources.sessions or resources.offers.held:  # noqa: ASYNC110 - it ends by itself
        await asyncio.sleep(0)
    client = await PeerClient.connect(resources.addresses[0], None)
    try:
        await client.call(messages.SetMemory(bytes=1 << 30))
        described = await client.call(messages.Describe())
    finally:
        await client.aclose()
    assert described.models == ()
    assert described.free_bytes == free_bytes
    assert (resources.shards.held, resources.manifest_entries.held) == (0, 0)


def test_a_peer_lives_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with null_peers(tmp_path, 1, kv_disk_bytes=1 << 20) as (daemon,):
            address = daemon.resources.addresses[0]
            frames = talk(address)
            client = await PeerClient.connect(address, None)
            await client.call(messages.SetMemory(bytes=1 << 30))
            free_bytes = (await client.call(messages.Describe())).free_bytes
            await client.aclose()
            heard = await say(address, frames)
            assert "failed" not in heard
            assert heard.count("ok") == sum("call" in frame.header for frame in frames)
            for number in range(TALKS):
                async with asyncio.timeout(60):
                    await attack(address, frames, random.Random(number))
                    if number % 10 == 0:
                        await check_free(daemon, free_bytes)
            await check_free(daemon, free_bytes)

    asyncio.run(main())
    assert caplog.messages == [], "what is refused is not our failure"
