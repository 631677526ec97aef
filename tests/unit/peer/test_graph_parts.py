"""What a peer refuses of a coordinator that sends parts of graphs."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, TensorProto

from edge.concurrency.blocking import run_blocking
from edge.errors import CapacityError, EdgeError, ProtocolError, RequestError
from edge.graphs.parts import GRAPH_NAME, GraphPart, echo_part
from edge.graphs.tensors import pack, unpack
from edge.offload import ManifestBuilder
from edge.progress import ignore_progress
from edge.protocol.client import PeerClient
from edge.protocol.graph_frames import ClosePart, OpenPart
from edge.protocol.part_runs import HELLO, STILL_HERE, PartAnswer, ask, receive_answer
from edge.protocol.peer_info import PeerInfo, describe_peer
from edge.runs.shipping import ShardShipment, ship
from edge.transport import Link, PeerLostError
from tests.support.null_peers import null_peers

BUFFER_BYTES = 32 << 20
HELD_BYTES = 1 << 20


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

    def __init__(self, peer: PeerInfo, client: PeerClient, digest: str) -> None:
        self.client, self.session = client, uuid.uuid4().hex
        self.peer, self._digest = peer, digest

    async def open(self, **changes: Any) -> None:
        await self.client.call(
            OpenPart(
                **{
                    "session": self.session,
                    "model": "m",
                    "manifest_digest": self._digest,
                    "buffer_bytes": BUFFER_BYTES,
                    "held_bytes": HELD_BYTES,
                    "run_limit_s": 5.0,
                    **changes,
                }
            )
        )

    async def link(self, session: str | None = None) -> Link:
        return await self.peer.connect_link({HELLO: session or self.session})

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
                await talk(Talk(peer, client, part.manifest.digest))
            finally:
                await client.aclose()

    asyncio.run(main())


def asked(link: Link, *blobs: bytes) -> list[PartAnswer]:
    """The answers to runs that are all asked before the first answer is read."""
    for number, blob in enumerate(blobs):
        ask(link, number, blob)
    return [receive_answer(link, HELD_BYTES) for _ in blobs]


def test_wrong_calls_are_refused_and_right_ones_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="edge.peer.audit")
    good = pack({"x": np.arange(5, dtype=np.uint8)})

    async def talk(peer: Talk) -> None:
        await peer.refused(peer.open(manifest_digest="0" * 64), ProtocolError, "not sent")
        await peer.refused(peer.open(buffer_bytes=1 << 42), CapacityError, "needs 4.0 TiB")
        early = await peer.link()
        with pytest.raises(PeerLostError):
            await run_blocking(lambda: asked(early, good))
        await peer.open()
        await peer.refused(peer.open(), ProtocolError, "open already")
        (told,) = (await describe_peer(peer.peer.address, None)).models
        assert (told.name, told.dtype) == ("m", "onnx")
        assert told.buffer_bytes >= BUFFER_BYTES
        link = await peer.link()
        blobs = [good, b"no tensors at all", pack({"x": np.ones(3, np.float32)}), b"", good]
        found = await run_blocking(lambda: asked(link, *blobs))
        assert [each.number for each in found] == list(range(5))
        assert [each.failed for each in found] == [False, True, True, True, False]
        assert unpack(found[0].content)[0]["y"].tolist() == [0, 1, 2, 3, 4]
        for each, said in ((found[1], b"cut off"), (found[2], b"Unexpected input data type")):
            assert said in bytes(each.content)
        for other in (await peer.link(), await peer.link("unknown")):  # it has one already
            with pytest.raises(PeerLostError):
                await run_blocking(partial(asked, other, good))
        await run_blocking(lambda: ask(link, STILL_HERE, b""))
        assert (await run_blocking(lambda: receive_answer(link, 0))).number == STILL_HERE
        await peer.client.call(ClosePart(session=peer.session))
        with pytest.raises(PeerLostError):
            await run_blocking(lambda: asked(link, good))
        assert not (await describe_peer(peer.peer.address, None)).models
        lines = [each for each in caplog.messages if "unknown device" in each]
        assert [each.rsplit(" ", 1)[1] for each in lines] == ["m", "m"]
        assert ["loaded" in each for each in lines] == [True, False]

    talk_about(echo_part(), tmp_path, talk)


def test_inputs_and_results_have_what_is_reserved(tmp_path: Path) -> None:
    large = pack({"x": np.zeros(HELD_BYTES // 3, np.uint8)})
    too_large = pack({"x": np.zeros(HELD_BYTES * 3 // 5, np.uint8)})

    async def talk(peer: Talk) -> None:
        await peer.open()
        link = await peer.link()

        def runs() -> list[PartAnswer]:
            found = []
            for number, blob in enumerate((large, too_large, large)):
                ask(link, number, blob)
                found.append(receive_answer(link, HELD_BYTES))
            return found

        found = await run_blocking(runs)
        assert [each.failed for each in found] == [False, True, False]
        assert b"are the most" in bytes(found[1].content)

        def beyond() -> None:
            ask(link, 4, bytes(HELD_BYTES + 1))
            receive_answer(link, HELD_BYTES)

        with pytest.raises(PeerLostError):
            await run_blocking(beyond)

    talk_about(echo_part(), tmp_path, talk)


def test_a_part_reads_no_other_file_of_the_peer(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"abcd")

    async def talk(peer: Talk) -> None:
        await peer.refused(peer.open(), RequestError, "not in the file of the part")

    talk_about(changed_echo(reads_a_file), tmp_path, talk)
