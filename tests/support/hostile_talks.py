"""Talks with a live peer in which frames are changed, left out or sent again.

`python -m tests.support.hostile_talks 100000 --seed 7` sends that many changed frames to one peer,
most of them in the middle of a session that is loaded.
`coverage_guided` says frames to a peer of this process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import logging
import random
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edge import transport
from edge.host.free_memory import format_size
from edge.kernels.sampling.parameters import SamplingParameters
from edge.membership.membership import Membership, credentials
from edge.membership.store import CONFIG_VARIABLE, MembershipStore
from edge.offload import Manifest, ManifestBuilder
from edge.partition import Plan, Shard, Stage
from edge.peer.daemon import PeerDaemon
from edge.protocol import (
    kv_frames,
    peer_frames,
    prefix_frames,
    session_frames,
    step_frames,
    weight_frames,
)
from edge.protocol.assignment import Assignment
from edge.protocol.client import PeerClient
from edge.protocol.fields import to_json, token_bytes
from edge.protocol.frame_codec import Call, to_frame
from edge.protocol.frame_table import FRAMES
from edge.protocol.heartbeat import ALIVE
from edge.protocol.kept_files import Keep
from edge.protocol.lease import Lease
from edge.protocol.measurements import Glance, MemoryRate, Probe, Profile, Prove
from edge.protocol.peer_info import PeerInfo, describe_peer
from edge.protocol.step import SamplingTerms, Step, StepEntry, StepLimits
from edge.protocol.topology import Place
from edge.protocol.wire_rules import WireRules
from edge.transport import Credentials, Frame, WireRule
from edge.transport import ProtocolError as FrameError
from edge.transport.frame import decode
from tests.support.formats import uniform_format
from tests.support.kept_inputs import Target, kept
from tests.support.mutated_frames import mutated_frame, wire
from tests.support.null_peers import null_peers
from tests.support.processes import Daemon
from tests.support.specs import plain_spec

ROUND = 1000
"""Changed frames, after which the peer is looked at."""

LASTS = 100
"""Changed frames in one session: sooner or later one of them ends it, and the rest are refused."""

MISSES = 5
"""Times that a peer may not answer in time, each time it is bothered."""

PROMISED_BYTES = {"null": 256 << 20, "ort": 320 << 20}
"""What the peer of `main` promises to have at most, by its back end. Of that it has 67 MiB before
anything comes, and with ONNX Runtime 125."""

ROW_BYTES = 2 * 2 * 3 * 8 * 4
"""Of keys and values of a token: two layers, three heads of 8, in float32."""

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
            context_tokens=16,
            chunk_tokens=8,
            requests=2,
            cached_tokens=32,
            disk_tokens=32,
            saved_states=1,
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


def talk(address: str, memory_bytes: int = 4 << 30) -> list[Frame]:
    """What a coordinator sends that loads the shard and asks it once. Of three things the peer says
    that there are none: places for states, neighbours, and inputs that it has observed."""
    assignment, manifest, pieces = shard()
    digest = manifest.digest
    assignment = replace(assignment, manifest_digest=digest)
    prompt = StepEntry(request="r", position=0, tokens=(1, 2, 3), logit_rows=1)
    terms = SamplingTerms(sampling=SamplingParameters(), end_ids=frozenset({7}), max_new_tokens=4)
    of_prefix: Any = {"session": "s", "request": "r", "stage": 0, "rank": 0}
    sent: list[Any] = [
        peer_frames.Describe(),
        peer_frames.SetMemory(bytes=memory_bytes),
        peer_frames.TakeOver(lease=Lease()),
        Keep(remove=("shards/x", "packed/y")),
        weight_frames.Offer(manifest=manifest),
        *(weight_frames.Piece(manifest=digest, digest=d, content=c) for d, c in pieces.items()),
        weight_frames.Seal(manifest=digest),
        session_frames.Open(assignment=assignment, lease=Lease(), prefix_secret=bytes(32)),
        session_frames.Connect(session="s", places={(0, 0): Place(name="n", addresses=(address,))}),
        prefix_frames.MatchPrefix(session="s", request="r", prompt=token_bytes([1, 2, 3])),
        prefix_frames.AskPrefix(point=2, **of_prefix),
        prefix_frames.ReadPrefix(first=0, last=2, has_states=False, pieces=(0,), **of_prefix),
        prefix_frames.PutPrefix(
            session="s",
            request="r",
            first=0,
            last=2,
            has_states=True,
            is_whole=True,
            pieces=(),
            content=b"",
        ),
        kv_frames.Reserve(session="s", request="r", tokens=4),
        step_frames.RunStep(session="s", step=Step(entries=(prompt,), run=3), terms={"r": terms}),
        step_frames.YieldRun(session="s"),
        step_frames.RunStep(
            session="s", step=Step(entries=(replace(prompt, request="q"),), states=True)
        ),
        kv_frames.SwapOut(session="s", request="r"),
        kv_frames.SaveState(session="s", request="r", tokens=3, place=0),
        kv_frames.PutKv(
            session="s", request="p", first=0, tokens=(1, 2), rows=bytes(2 * ROW_BYTES)
        ),
        session_frames.AskLink(session="s", stage=0, rank=1),
        session_frames.Measure(session="s"),
        session_frames.CountSteps(session="s"),
        session_frames.Observed(session="s", run=0),
        step_frames.Finish(session="s", request="r"),
        session_frames.Close(session="s"),
    ]
    return _frames(sent)


def measures(address: str, device: str | None = None) -> list[Frame]:
    """What a coordinator has a peer measure, of links to itself; two of these take a second."""
    place = Place(name="n", addresses=(address,), device=device)
    return _frames(
        [
            Probe(place=place, small_bytes=8, large_bytes=9),
            Glance(place=place, small_bytes=8, large_bytes=9),
            Profile(model=SPEC, weight_format=uniform_format("int4", 32)),
            Prove(weight_format=uniform_format("int4", 32), seed=1),
            MemoryRate(),
        ]
    )


def _frames(sent: Sequence[Any]) -> list[Frame]:
    return [
        to_frame(each.kind, each, call=number if isinstance(each, Call) else None)
        for number, each in enumerate(sent)
    ]


def of_run(frames: Sequence[Frame], run: str, session: str = "s") -> list[Frame]:
    """The same, for a run and a session of these names: whoever takes over a run with a changed
    term has that one refused from then on, and a session is of one connection."""

    def named(header: Mapping[str, Any]) -> dict[str, Any]:
        found = dict(header)
        if "lease" in found:
            found["lease"] = to_json(Lease(run=run))
        if found.get("session") == "s":
            found["session"] = session
        if isinstance(found.get("assignment"), dict):
            found["assignment"] = named(found["assignment"])
        return found

    return [replace(each, header=named(each.header)) for each in frames]


@functools.cache
def kept_frames() -> tuple[Frame, ...]:
    """Those that once reached a branch of the peer that none before them had."""
    return tuple(decode(content) for _kind, content in kept("talks", FRAMES))


async def attack(
    address: str, frames: list[Frame], chance: random.Random, shown: Credentials | None = None
) -> None:
    """One talk with one to three of its frames changed, left out or sent again."""
    frames = list(frames)
    for _ in range(chance.choice((1, 1, 2, 3))):
        at = chance.randrange(len(frames))
        frames[at : at + 1] = chance.choice(
            ([mutated_frame(frames[at], chance)], [mutated_frame(frames[at], chance)],
             [], [frames[at]] * 2, [frames[at], mutated_frame(frames[at], chance)])
        )  # fmt: skip
    await say(address, frames, shown)


async def say(address: str, frames: list[Frame], shown: Credentials | None = None) -> list[str]:
    """What kinds of answers come, until it is hung up on."""
    kinds = []
    channel = await transport.connect(address, credentials=shown, hello={"name": "hostile"})
    try:
        for frame in frames:
            await channel.send(frame)
            is_call = issubclass(FRAMES[frame.kind], Call)
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


async def check_free(daemon: PeerDaemon, free_bytes: int, shown: Credentials | None = None) -> None:
    """The peer answers, and holds nothing of anybody's."""
    resources = daemon.resources
    rooms = resources.frames, resources.small_frames, resources.large_answers
    held = resources.offers, resources.links, resources.copy_quota, *rooms
    while resources.sessions or any(each.held for each in held):  # noqa: ASYNC110 - it ends
        await asyncio.sleep(0)
    client = await PeerClient.connect(resources.addresses[0], shown)
    try:
        await client.call(peer_frames.SetMemory(bytes=4 << 30))
        described = await client.call(peer_frames.Describe())
    finally:
        await client.aclose()
    assert described.models == ()
    assert described.free_bytes == free_bytes
    assert (resources.shards.held, resources.manifest_entries.held) == (0, 0)


async def load(
    address: str, frames: list[Frame], shown: Credentials | None
) -> tuple[transport.Channel, str]:
    """A connection in a session that is loaded as in `frames`; and the answer to the last of these,
    "ok" if it is ready."""
    loading = 1 + next(
        at for at, each in enumerate(frames) if each.kind == session_frames.Connect.kind
    )
    channel = await transport.connect(address, credentials=shown, hello={"name": "hostile"})
    try:
        for frame in frames[:loading]:
            await channel.send(frame)
            answer = await channel.receive()
            while answer.kind == ALIVE.kind:
                answer = await channel.receive()
    except BaseException:
        await channel.aclose()
        raise
    return channel, answer.kind


async def bother(
    address: str,
    frames: list[Frame],
    seldom: list[Frame],
    count: int,
    chance: random.Random,
    shown: Credentials | None = None,
    session: str = "s",
) -> Counter[str]:
    """Load as in `frames`, then send so many changed ones, of `seldom` one in a hundred; what came
    back, by kind."""
    found: Counter[str] = Counter()
    while count > 0:
        run = f"{chance.getrandbits(64):x}"
        frames = of_run(frames, run, session)
        try:
            channel, answer = await load(address, frames, shown)
        except transport.PeerLostError:  # handshakes have seconds; a busy machine may take longer
            found["not reached"] += 1
            if found["not reached"] > MISSES:
                raise
            continue
        found["loaded" if answer == "ok" else "not loaded"] += 1
        meant = [*frames, *of_run(kept_frames(), run, session)]
        try:
            for _ in range(min(count, LASTS)):
                count -= 1
                whose = meant if chance.randrange(100) else seldom
                frame = mutated_frame(chance.choice(whose), chance)
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


@contextlib.asynccontextmanager
async def hostile_member(folder: Path) -> AsyncIterator[tuple[PeerDaemon, Credentials]]:
    """A peer, and another device of its cluster."""
    attic = Membership.founded("attic")
    assert attic.authority is not None
    cellar = Membership.enrolled(attic.authority, attic.tag_key, "cellar")
    async with null_peers(folder, 1, kv_disk_bytes=1 << 20, membership=attic) as (daemon,):
        yield daemon, credentials(lambda: cellar)


def holds_something(peer: PeerInfo) -> bool:
    return bool(peer.models) or peer.free_bytes != peer.memory_bytes - peer.floor_bytes


def peak_bytes(process: int) -> int:
    """The most that a process has had in memory."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    (line,) = (each for each in lines if each.startswith("VmHWM"))
    return int(line.split()[1]) << 10


@contextlib.contextmanager
def promising_daemon(folder: Path, backend: str) -> Iterator[tuple[Daemon, Credentials]]:
    """A peer in a process of its own, and another device of its cluster."""
    attic = MembershipStore(folder / "attic").founded("attic")
    assert attic.authority is not None
    cellar = Membership.enrolled(attic.authority, attic.tag_key, "cellar")
    promised = format_size(PROMISED_BYTES[backend])
    options = ("--backend", backend, "--memory", promised, "--no-announce")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CONFIG_VARIABLE, str(folder / "attic"))
        daemon = Daemon(folder / "peer", *options, "--kv-disk", f"{folder / 'kv'}:1MiB")
    with daemon:
        yield daemon, credentials(lambda: cellar)


async def main() -> None:
    """Bother a peer in a process of its own, and see now and then that it lives on, holds nothing
    and keeps its promise of memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", choices=PROMISED_BYTES, default="null")
    parser.add_argument("--connections", type=int, default=1, help="that send at once")
    given = parser.parse_args()
    began_s, outcomes = time.perf_counter(), Counter[str]()
    promised_bytes = PROMISED_BYTES[given.backend]
    with (
        tempfile.TemporaryDirectory() as folder,
        promising_daemon(Path(folder), given.backend) as (daemon, shown),
    ):
        first_bytes = peak_bytes(daemon.process.pid)
        device = (await describe_peer(daemon.address, shown)).id
        frames, seldom = talk(daemon.address, promised_bytes), measures(daemon.address, device)

        async def bothered(number: int, count: int, seed: int) -> None:
            nonlocal outcomes
            chance, session = random.Random(seed + number), f"s{number}"
            outcomes += await bother(daemon.address, frames, seldom, count, chance, shown, session)

        for first in range(0, given.count, ROUND):
            seed = (given.seed << 40) + first
            count = min(ROUND, given.count - first)
            try:
                async with asyncio.timeout(300), asyncio.TaskGroup() as group:
                    for number in range(given.connections):
                        part = (count + number) // given.connections
                        group.create_task(bothered(number, part, seed))
                async with asyncio.timeout(300):
                    while holds_something(await describe_peer(daemon.address, shown)):
                        pass
                assert daemon.process.poll() is None
                assert daemon.messages == ""
                assert peak_bytes(daemon.process.pid) < promised_bytes
            except BaseException:
                print(f"seed {seed} failed")
                raise
        most_bytes = peak_bytes(daemon.process.pid)
    print(
        f"{given.count} frames in {time.perf_counter() - began_s:.0f} s; the peer had "
        f"{first_bytes >> 20} MiB before and {most_bytes >> 20} at most: {dict(outcomes)}"
    )


_LAST_CALL = 1 << 40
"""No frame has this number; who is answered it has been answered all before."""


class Talk:
    """With one peer; who hangs up is called anew, and some time after loading it is loaded anew."""

    def __init__(self, address: str, shown: Credentials) -> None:
        self._address, self._shown = address, shown
        self.frames = talk(address)
        self._channel: transport.Channel | None = None
        self._left, self._run = 0, 0

    async def say(self, frame: Frame) -> str:
        """The kind of what came back first, once all has."""
        if self._left == 0 or self._channel is None:
            await self.aclose()
            self._run += 1
            frames = of_run(self.frames, f"{self._run}")
            self._channel, _ready = await load(self._address, frames, self._shown)
            self._left = LASTS
        self._left -= 1
        told: list[Frame] = []
        try:
            await self._channel.send(frame)
            await self._channel.send(to_frame("describe", peer_frames.Describe(), call=_LAST_CALL))
            while not told or told[-1].header.get("call") != _LAST_CALL:
                told.append(await self._channel.receive())
        except transport.ProtocolError:
            return "cannot be sent"
        except transport.TransportError:
            self._left = 0
            return "hung up on"
        return told[0].kind

    async def aclose(self) -> None:
        if self._channel is not None:
            await self._channel.aclose()


class _Told(logging.Handler):
    """What is refused is not our failure: whatever is logged is an error here."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


def changed(data: bytes, chance: random.Random) -> bytes:
    """Another frame of that kind; one that cannot be sent stays as it is."""
    try:
        return wire(mutated_frame(decode(data), chance))
    except (FrameError, RecursionError):
        return data


@contextlib.contextmanager
def target() -> Iterator[Target]:
    """For `coverage_guided`."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        runner = stack.enter_context(asyncio.Runner())
        peer = contextlib.AsyncExitStack()
        daemon, shown = runner.run(peer.enter_async_context(hostile_member(folder)))
        stack.callback(lambda: runner.run(peer.aclose()))
        with_peer = Talk(daemon.resources.addresses[0], shown)
        stack.callback(lambda: runner.run(with_peer.aclose()))
        told = _Told()
        logging.getLogger().addHandler(told)
        stack.callback(logging.getLogger().removeHandler, told)

        def outcome(kind: str, content: bytes) -> str:
            try:
                frame = decode(content)
            except FrameError:
                return "cannot be sent"
            answer = runner.run(with_peer.say(frame))
            assert not told.lines, told.lines
            return f"{kind}: {answer}"

        yield Target(
            sound=[(frame.kind, wire(frame)) for frame in with_peer.frames],
            lasting=lambda kind: kind != "connect",  # it has the peer's address
            changed=changed,
            outcome=outcome,
        )


if __name__ == "__main__":
    asyncio.run(main())
