"""Sends each peer the slices of its shard: hashed in pieces, verified there, resumed after a break.

A shard that a peer has already costs one question and no bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.client import PeerClient
from edge.errors import CheckpointError, PeerLostError
from edge.formats import WeightFormat, WeightSource
from edge.layout import MatrixSlice, ShardLayout, VectorSlice
from edge.progress import OnProgress, Progress
from offload import PIECE_BYTES, Manifest, ManifestBuilder, StoreError

PIECES_IN_FLIGHT = 4
"""Sent but not yet confirmed as stored: enough to hide the peer's disk, few enough to bound its
memory and to stop soon when it refuses one."""

MAX_RECONNECTS = 5
"""Broken connections in a row, without a piece in between, before a peer counts as lost."""


class ShardShipment:
    """One shard's tensors, readable again for the pieces that a peer lacks."""

    def __init__(
        self,
        layout: ShardLayout,
        source: WeightSource,
        manifest: Manifest,
        suffixes: tuple[str, ...],
    ) -> None:
        self.manifest = manifest
        self._suffixes = suffixes
        self._layout = layout
        self._source = source

    def pieces(self, wanted: frozenset[str]) -> Iterator[tuple[str, memoryview]]:
        """(digest, bytes) of every wanted piece, once each; reads only tensors that hold one."""
        entries = {entry.name: entry for entry in self.manifest.tensors}
        left = set(wanted)
        for names, read in _tensor_groups(self._layout, self._source, self._suffixes):
            if left.isdisjoint(p.digest for name in names for p in entries[name].pieces):
                continue
            for name, array in read().items():
                flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
                for index, piece in enumerate(entries[name].pieces):
                    if piece.digest in left:
                        left.remove(piece.digest)
                        start = index * PIECE_BYTES
                        yield piece.digest, flat[start : start + piece.nbytes].data


def _tensor_groups(
    layout: ShardLayout, source: WeightSource, suffixes: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], Callable[[], dict[str, NDArray[Any]]]]]:
    """The shard file's tensors in order, in groups that are read together."""
    if layout.embedding:
        yield ("embedding",), lambda: {"embedding": source.embedding(layout.embedding)}
    for matrix in layout.matrices:
        names = tuple(f"{matrix.name}.{suffix}" for suffix in suffixes)

        def read(matrix: MatrixSlice = matrix) -> dict[str, NDArray[Any]]:
            return {f"{matrix.name}.{s}": a for s, a in source.matrix(matrix).items()}

        yield names, read
    for vector in layout.vectors:

        def read_vector(vector: VectorSlice = vector) -> dict[str, NDArray[Any]]:
            return {vector.name: source.vector(vector)}

        yield (vector.name,), read_vector


def describe_shard(
    layout: ShardLayout,
    source: WeightSource,
    weight_format: WeightFormat,
    *,
    fingerprint: str,
    cache_root: Path,
    on_progress: Callable[[int, int], None],
) -> ShardShipment:
    """The shard's manifest, from the cache if this very shard was described before.

    Describing reads and hashes every byte of the shard. Raises CheckpointError for damaged files.
    """
    suffixes = weight_format.tensor_suffixes
    key = hashlib.sha256(repr((fingerprint, weight_format, layout)).encode()).hexdigest()
    path = cache_root / f"{key}.json"
    with contextlib.suppress(OSError, StoreError):
        manifest = Manifest.from_json(path.read_bytes())
        return ShardShipment(layout, source, manifest, suffixes)
    builder = ManifestBuilder()
    groups = list(_tensor_groups(layout, source, suffixes))
    try:
        for done, (_names, read) in enumerate(groups):
            on_progress(done, len(groups))
            for name, array in read().items():
                builder.add(name, array)
    except StoreError as error:
        raise CheckpointError(str(error)) from error
    on_progress(len(groups), len(groups))
    manifest = builder.build()
    cache_root.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(manifest.to_json())
    partial.replace(path)
    return ShardShipment(layout, source, manifest, suffixes)


async def ship(
    shipment: ShardShipment,
    connect: Callable[[], Awaitable[PeerClient]],
    *,
    on_progress: OnProgress,
) -> tuple[PeerClient, int]:
    """Bring one peer's shard up to date; the client that did it, and the bytes it took.

    A broken connection is made anew and goes on where the peer stopped. Raises PeerLostError when
    that fails MAX_RECONNECTS times without progress.
    """
    sent_bytes = 0
    failures = 0
    while True:
        client = await connect()
        try:
            manifest = shipment.manifest
            answer = await client.call("offer", payload=manifest.to_json().encode())
            missing = frozenset(json.loads(bytes(answer.payload)))
            header = {"manifest": answer.header["manifest"]}
            sizes = {p.digest: p.nbytes for _offset, p in manifest.placements()}
            total = sum(sizes[digest] for digest in missing)
            async for nbytes in _send_pieces(client, shipment, missing, header):
                sent_bytes += nbytes
                failures = 0
                on_progress(Progress(phase="send", peer=client.name, done=sent_bytes, total=total))
            await client.call("seal", header)
        except PeerLostError:
            await client.aclose()
            failures += 1
            if failures > MAX_RECONNECTS:
                raise
        except BaseException:
            await client.aclose()
            raise
        else:
            return client, sent_bytes


async def _send_pieces(
    client: PeerClient,
    shipment: ShardShipment,
    missing: frozenset[str],
    header: dict[str, Any],
) -> AsyncIterator[int]:
    """Send the pieces, a few ahead of their confirmation; yields each one's bytes."""
    pieces = shipment.pieces(missing) if missing else iter(())
    flying: set[asyncio.Task[int]] = set()

    async def send(digest: str, content: memoryview) -> int:
        await client.call("piece", {**header, "digest": digest}, content)
        return content.nbytes

    try:
        while True:
            piece = await asyncio.to_thread(next, pieces, None)
            if piece is not None:
                flying.add(asyncio.create_task(send(*piece)))
            while flying and (piece is None or len(flying) >= PIECES_IN_FLIGHT):
                done, flying = await asyncio.wait(flying, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    yield task.result()
            if piece is None:
                return
    except StoreError as error:
        raise CheckpointError(str(error)) from error
    finally:
        for task in flying:
            task.cancel()
        await asyncio.gather(*flying, return_exceptions=True)
