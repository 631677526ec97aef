"""Talks with a live peer in which frames are changed, left out or sent again.

`python -m tests.support.hostile_talks 100000 --seed 7` sends that many changed frames to one peer,
most of them in the middle of a session that is loaded.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import resource
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge import transport
from edge.kernels.sampling.parameters import SamplingParameters
from edge.offload import Manifest, ManifestBuilder
from edge.partition import Plan, Shard, Stage
from edge.peer.daemon import PeerDaemon
from edge.protocol import messages
from edge.protocol.assignment import Assignment
from edge.protocol.client import PeerClient
from edge.protocol.fields import to_json, token_bytes
from edge.protocol.frame_codec import Call, to_frame
from edge.protocol.kept_files import Keep
from edge.protocol.lease import Lease
from edge.protocol.measurements import MemoryRate, Profile
from edge.protocol.step import SamplingTerms, Step, StepEntry, StepLimits
from edge.protocol.topology import Place
from edge.protocol.wire_rules import WireRules
from edge.transport import Frame, WireRule
from tests.support.formats import uniform_format
from tests.support.mutated_frames import mutated_frame
from tests.support.null_peers import null_peers
from tests.support.specs import plain_spec

ROUND = 1000
"""Changed frames, after which the peer is looked at."""

SPEC = plain_spec(num_layers=2, hidden_size=32, ffn_columns=32, vocab_size=50)
WHOLE = Shard(device="d", heads=range(3), ffn_columns=range(32), vocab=range(50))


def shard() -> tuple[Assignment, Manifest, dict[str, bytes]]:
    """All of a small model, and its weights in pieces: zeros."""
    assignment = Assignment(
        session="s",
        model=SPEC,
        plan=Plan(model="m", version=1, stages=(Stage(layers=range(2), shards=(WHOLE,)),)),
        stage=0,
        rank=0,
        weight_format=uniform_format("int4", 32),
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
    for matrix in assignment.weight_format.recipe.all_stored(layout.matrices):
        for array in matrix.arrays:
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
        messages.SetMemory(bytes=4 << 30),
        messages.TakeOver(lease=Lease()),
        Keep(remove=("shards/x", "packed/y")),
        messages.Offer(manifest=manifest),
        *(messages.Piece(manifest=digest, digest=d, content=c) for d, c in pieces.items()),
        messages.Seal(manifest=digest),
        messages.Open(assignment=assignment, lease=Lease(), prefix_secret=bytes(32)),
        messages.Connect(session="s", places={(0, 0): Place(name="n", addresses=(address,))}),
        messages.MatchPrefix(session="s", request="r", prompt=token_bytes([1, 2, 3])),
        messages.Reserve(session="s", request="r", tokens=4),
        messages.RunStep(session="s", step=Step(entries=(prompt,), run=3), terms={"r": terms}),
        messages.YieldRun(session="s"),
        messages.RunStep(
            session="s", step=Step(entries=(replace(prompt, request="q"),), states=True)
        ),
        messages.SwapOut(session="s", request="r"),
        messages.SaveState(session="s", request="r", tokens=3, place=0),
        messages.Measure(session="s"),
        messages.Observed(session="s", run=0),
        messages.Finish(session="s", request="r"),
        messages.Close(session="s"),
    ]
    return [
        to_frame(each.kind, each, call=number if isinstance(each, Call) else None)
        for number, each in enumerate(sent)
    ]


def of_run(frames: list[Frame], run: str) -> list[Frame]:
    """The same, for a run of this name: whoever takes over another one with a changed term has that
    one refused from then on."""
    return [
        replace(each, header={**each.header, "lease": to_json(Lease(run=run))})
        if "lease" in each.header
        else each
        for each in frames
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
    rooms = resources.frames, resources.small_frames, resources.large_answers
    held = resources.offers, resources.links, resources.copy_room, *rooms
    while resources.sessions or any(each.held for each in held):  # noqa: ASYNC110 - it ends
        await asyncio.sleep(0)
    client = await PeerClient.connect(resources.addresses[0], None)
    try:
        await client.call(messages.SetMemory(bytes=4 << 30))
        described = await client.call(messages.Describe())
    finally:
        await client.aclose()
    assert described.models == ()
    assert described.free_bytes == free_bytes
    assert (resources.shards.held, resources.manifest_entries.held) == (0, 0)


async def bother(
    address: str, frames: list[Frame], count: int, chance: random.Random
) -> Counter[str]:
    """Load as in `frames`, then send so many changed ones; what came back, by kind."""
    found: Counter[str] = Counter()
    loading = 1 + next(at for at, each in enumerate(frames) if each.kind == messages.Connect.kind)
    while count > 0:
        channel = await transport.connect(address, credentials=None, hello={"name": "hostile"})
        frames = of_run(frames, f"{chance.getrandbits(64):x}")
        try:
            for frame in frames[:loading]:
                await channel.send(frame)
                await channel.receive()
            while count > 0:
                count -= 1
                frame = mutated_frame(chance.choice(frames), chance)
                await channel.send(frame)
                if frame.header.get("call") is not None:
                    found[(await channel.receive()).kind] += 1
        except transport.ProtocolError:
            found["cannot be sent"] += 1
        except transport.TransportError:
            found["hung up on"] += 1
        finally:
            await channel.aclose()
    return found


async def main() -> None:
    """Bother one peer, and see now and then that it lives on and holds nothing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    began_s, outcomes = time.perf_counter(), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        async with null_peers(Path(folder), 1, kv_disk_bytes=1 << 20) as (daemon,):
            address = daemon.resources.addresses[0]
            frames = talk(address)
            client = await PeerClient.connect(address, None)
            await client.call(messages.SetMemory(bytes=4 << 30))
            free_bytes = (await client.call(messages.Describe())).free_bytes
            await client.aclose()
            for first in range(0, given.count, ROUND):
                seed = (given.seed << 40) + first
                try:
                    async with asyncio.timeout(120):
                        count = min(ROUND, given.count - first)
                        outcomes += await bother(address, frames, count, random.Random(seed))
                        await check_free(daemon, free_bytes)
                except BaseException:
                    print(f"seed {seed} failed")
                    raise
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(
        f"{given.count} frames in {time.perf_counter() - began_s:.0f} s with at most {peak} MiB: "
        f"{dict(outcomes)}"
    )


if __name__ == "__main__":
    asyncio.run(main())
