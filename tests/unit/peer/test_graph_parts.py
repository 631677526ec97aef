"""What a peer refuses of a coordinator that sends parts of graphs."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, TensorProto

from edge.errors import CapacityError, EdgeError, ProtocolError, RequestError
from edge.graphs.parts import GRAPH_NAME, GraphPart, echo_part
from edge.graphs.tensors import pack, unpack
from edge.offload import ManifestBuilder
from edge.progress import ignore_progress
from edge.protocol.client import PeerClient
from edge.protocol.graph_frames import MOST_RUNS, ClosePart, FeedPart, OpenPart, TakeResult
from edge.protocol.peer_info import describe_peer
from edge.runs.shipping import ShardShipment, ship
from tests.support.null_peers import null_peers

BUFFER_BYTES = 32 << 20


def changed_echo(change: Callable[[ModelProto], object]) -> GraphPart:
    """The part that gives bytes back, with something else in its graph."""
    echo = echo_part()
    model = ModelProto.FromString(echo.groups[0][1]()[GRAPH_NAME].tobytes())
    change(model)
    content = np.frombuffer(model.SerializeToString(), np.uint8)
    builder = ManifestBuilder()
    builder.add(GRAPH_NAME, content)
    return replace(
        echo,
        manifest=builder.build(),
        groups=[((GRAPH_NAME,), lambda: {GRAPH_NAME: content})],
    )


def reads_a_file(model: ModelProto) -> None:
    """Add a weight that lies in a file of the peer."""
    weight = model.graph.initializer.add()
    weight.name, weight.data_type = "w", TensorProto.UINT8
    weight.dims.append(4)
    weight.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "../../../secret"), ("length", "4")):
        told = weight.external_data.add()
        told.key, told.value = key, value
    model.graph.output[0].name = "w"


class Talk:
    """A coordinator that has sent a part."""

    def __init__(self, client: PeerClient, digest: str) -> None:
        self.client, self.session, self._digest = client, uuid.uuid4().hex, digest

    async def open(self, **changes: Any) -> None:
        await self.client.call(
            OpenPart(
                **{
                    "session": self.session,
                    "model": "m",
                    "manifest_digest": self._digest,
                    "buffer_bytes": BUFFER_BYTES,
                    "held_bytes": 1 << 20,
                    "run_limit_s": 5.0,
                    **changes,
                }
            )
        )

    async def feed(self, run: int, content: bytes, total: int = 0, offset: int = 0) -> None:
        await self.client.call(
            FeedPart(
                session=self.session,
                run=run,
                total_bytes=total or len(content),
                offset=offset,
                content=content,
            )
        )

    async def take(self, run: int) -> bytes:
        piece = await self.client.call(TakeResult(session=self.session, run=run, offset=0))
        return bytes(piece.content)

    async def refused(self, work: Any, kind: type[EdgeError], said: str) -> None:
        with pytest.raises(kind, match=said):
            await work


def talk_about(part: GraphPart, folder: Path, talk: Callable[[Talk], Any]) -> None:
    async def main() -> None:
        async with null_peers(folder, 1) as (daemon,), asyncio.timeout(100):
            peer = await describe_peer(daemon.resources.addresses[0], None)
            shipment = ShardShipment(part.manifest, part.groups, Path())
            client, _sent = await ship(
                shipment, peer.connect, peer=peer.name, on_progress=ignore_progress
            )
            try:
                await talk(Talk(client, part.manifest.digest))
            finally:
                await client.aclose()

    asyncio.run(main())


def test_wrong_calls_are_refused_and_right_ones_go_on(tmp_path: Path) -> None:
    good = pack({"x": np.arange(5, dtype=np.uint8)})

    async def talk(peer: Talk) -> None:
        await peer.refused(peer.feed(0, b"x"), ProtocolError, "not open")
        await peer.refused(peer.take(0), ProtocolError, "not open")
        await peer.refused(peer.open(manifest_digest="0" * 64), ProtocolError, "not sent")
        await peer.refused(peer.open(buffer_bytes=1 << 42), CapacityError, "needs 4.0 TiB")
        await peer.open()
        await peer.refused(peer.open(), ProtocolError, "open already")
        await peer.refused(peer.take(0), ProtocolError, "not begun")
        await peer.refused(peer.feed(0, b"x", total=1 << 30), RequestError, "more than")
        await peer.refused(peer.feed(0, good, offset=3), ProtocolError, "not the next one")
        # A run that was begun wrongly stays begun: here the rest of it comes.
        await peer.feed(0, good[:5], total=len(good))
        await peer.refused(peer.feed(0, good, offset=5), ProtocolError, "not the next one")
        await peer.feed(0, good[5:], total=len(good), offset=5)
        assert unpack(await peer.take(0))[0]["y"].tolist() == [0, 1, 2, 3, 4]
        await peer.feed(1, b"no tensors at all")
        await peer.refused(peer.take(1), RequestError, "cut off")
        await peer.feed(2, pack({"x": np.ones(3, np.float32)}))
        await peer.refused(peer.take(2), RequestError, "Unexpected input data type")
        for run in range(3, 3 + MOST_RUNS):
            await peer.feed(run, good)
        await peer.refused(peer.feed(9, good), ProtocolError, "at most")
        await peer.client.call(ClosePart(session=peer.session))
        await peer.refused(peer.take(3), ProtocolError, "not open")

    talk_about(echo_part(), tmp_path, talk)


def test_a_part_reads_no_other_file_of_the_peer(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"abcd")

    async def talk(peer: Talk) -> None:
        await peer.refused(peer.open(), RequestError, "not in the file of the part")

    talk_about(changed_echo(reads_a_file), tmp_path, talk)


def test_inputs_come_in_while_a_result_is_waited_for(tmp_path: Path) -> None:
    good = pack({"x": np.arange(5, dtype=np.uint8)})

    async def talk(peer: Talk) -> None:
        await peer.open()
        await peer.feed(0, good[:5], total=len(good))
        waiting = asyncio.create_task(peer.take(0))
        await asyncio.sleep(0)  # so that the question is sent first
        await peer.feed(0, good[5:], total=len(good), offset=5)
        assert unpack(await waiting)[0]["y"].tolist() == [0, 1, 2, 3, 4]

    talk_about(echo_part(), tmp_path, talk)
