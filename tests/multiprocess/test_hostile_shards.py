"""A shard's file that is not what its layout says: refused before memory is taken for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edge.errors import ProtocolError
from edge.offload import PIECE_BYTES, ManifestBuilder
from edge.protocol.assignment import Assignment
from edge.protocol.client import PeerClient
from edge.protocol.lease import Lease
from edge.protocol.peer_frames import Describe
from edge.protocol.session_frames import Close, Open
from edge.protocol.step import StepLimits
from edge.protocol.weight_frames import Offer, Piece, Seal
from edge.protocol.wire_rules import WireRules
from edge.transport import WireRule
from edge.weights.checkpoint import Checkpoint
from tests.support.checkpoints import TinyCheckpoint
from tests.support.formats import uniform_format
from tests.support.plans import solo_assignment
from tests.support.processes import Daemon, own_credentials

Tensors = dict[str, NDArray[Any]]

NORM = "layers.0.attention_norm"
LIMITS = StepLimits(context_tokens=32, chunk_tokens=16, requests=1, cached_tokens=32)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("daemon"), "--no-announce") as daemon:
        yield daemon
        assert daemon.messages == "", "what is refused is not our failure"


@pytest.fixture(scope="module")
def whole(
    tiny_checkpoint: Callable[..., TinyCheckpoint], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Assignment, Tensors]:
    """All of a model for one peer, and its tensors."""
    with Checkpoint.open(tiny_checkpoint("llama").path) as checkpoint:
        rules = WireRules(sums=(WireRule(),), hops=())
        assignment = solo_assignment(checkpoint.spec, LIMITS, rules)
        source = checkpoint.source(
            uniform_format("int4"),
            cache_root=tmp_path_factory.mktemp("quantized"),
            on_progress=lambda _progress: None,
        )
        layout = assignment.layout
        tensors: Tensors = {"embedding": source.table("embedding", layout.embedding)}
        for matrix in layout.matrices:
            for suffix, array in source.matrix(matrix).items():
                tensors[f"{matrix.name}.{suffix}"] = array
        tensors |= {vector.name: source.vector(vector) for vector in layout.vectors}
        source.close()
    return assignment, tensors


async def opened(daemon: Daemon, assignment: Assignment, tensors: Tensors) -> int:
    """Send these tensors and have them loaded; what the peer then has free."""
    builder = ManifestBuilder()
    for name, array in tensors.items():
        builder.add(name, array)
    manifest = builder.build()
    pieces = {}
    for entry in manifest.tensors:
        flat = np.ascontiguousarray(tensors[entry.name]).reshape(-1).view(np.uint8)
        for number, piece in enumerate(entry.pieces):
            start = number * PIECE_BYTES
            pieces[piece.digest] = bytes(flat[start : start + piece.nbytes])
    client = await PeerClient.connect(daemon.address, own_credentials())
    try:
        missing = await client.call(Offer(manifest=manifest))
        for digest in missing.digests:
            await client.call(
                Piece(manifest=manifest.digest, digest=digest, content=pieces[digest])
            )
        await client.call(Seal(manifest=manifest.digest))
        await client.call(
            Open(
                assignment=replace(assignment, manifest_digest=manifest.digest),
                lease=Lease(),
                prefix_secret=bytes(32),
            )
        )
        free = (await client.call(Describe())).free_bytes
        await client.call(Close(session=assignment.session))
        return free
    finally:
        await client.aclose()


async def free_bytes(daemon: Daemon) -> int:
    client = await PeerClient.connect(daemon.address, own_credentials())
    try:
        return (await client.call(Describe())).free_bytes
    finally:
        await client.aclose()


def test_what_the_layout_says_is_loaded(daemon: Daemon, whole: tuple[Assignment, Tensors]) -> None:
    async def main() -> None:
        before = await free_bytes(daemon)
        assert await opened(daemon, *whole) < before

    asyncio.run(main())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda all: all | {NORM: np.zeros(1 << 24, np.float32)},
         f"{NORM} is float32 [16777216]; its layout makes it float32 [64]"),
        (lambda all: all | {NORM: all[NORM].astype(np.float64)},
         f"{NORM} is float64 [64]; its layout makes it float32 [64]"),
        (lambda all: {name: all[name] for name in all if name != NORM},
         f"the shard lacks {NORM}, which is in its layout"),
        (lambda all: all | {"more": np.zeros(3, np.float32)},
         "the shard has 'more', which is not in its layout"),
        (lambda all: all | {"embedding": all["embedding"][:-1]}, "embedding is float32 ["),
        (lambda all: all | {"head.codes": all["head.codes"].reshape(-1)}, "head.codes is uint8 ["),
        (lambda all: all | {"layers.1.down.scales": all["layers.1.down.scales"][:, :-1]},
         "layers.1.down.scales is float32 ["),
    ],
    ids=["larger", "another type", "missing", "more", "rows", "another shape", "columns"],
)  # fmt: skip
def test_another_file_is_refused(
    change: Callable[[Tensors], Tensors],
    message: str,
    daemon: Daemon,
    whole: tuple[Assignment, Tensors],
) -> None:
    async def main() -> None:
        before = await free_bytes(daemon)
        with pytest.raises(ProtocolError) as refused:
            await opened(daemon, whole[0], change(whole[1]))
        assert message in str(refused.value)
        assert await free_bytes(daemon) == before

    asyncio.run(main())
