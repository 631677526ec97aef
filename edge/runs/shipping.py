"""Shipping: sends each peer its shard in hashed pieces, verified there and resumable.

A shard that a peer has already costs one question and no bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.concurrency.blocking import run_blocking
from edge.errors import CheckpointError, NetworkError, PeerLostError
from edge.host.atomic_files import write_whole
from edge.offload import PIECE_BYTES, Manifest, ManifestBuilder, StoreError
from edge.progress import OnProgress, Progress
from edge.protocol.client import IT_LEAVES, PeerClient
from edge.protocol.weight_frames import Offer, Piece, Seal
from edge.weights.formats import WeightFormat
from edge.weights.further import PREFIX, FurtherHead
from edge.weights.layout import ShardLayout, token_table
from edge.weights.matrix_kind import WeightSource
from edge.weights.recipe import Recipe, StoredMatrix

PIECES_IN_FLIGHT = 4
"""Pieces sent but not confirmed as stored: enough to hide the peer's disk, few enough to bound its
memory and to stop soon after a refusal."""

MAX_RECONNECTS = 5
"""Broken connections in a row, without progress, before a peer counts as lost."""

FIRST_DELAY_S = 0.1
"""Seconds before reconnecting; doubled each time. All five take 3 s: a radio has time to recover,
and a lost device is noticed soon."""


_Group = tuple[tuple[str, ...], Callable[[], dict[str, NDArray[Any]]]]
"""Names of tensors, and a function that reads them."""


@dataclass(frozen=True, slots=True)
class ShardShipment:
    """One shard's tensors, readable again for the pieces that a peer lacks."""

    manifest: Manifest
    groups: Sequence[_Group]
    remembered: Path
    """The file of the cached manifest."""

    def forget(self) -> None:
        """Delete the cached manifest, because the files have changed."""
        with contextlib.suppress(OSError):
            self.remembered.unlink()

    def pieces(self, wanted: frozenset[str]) -> Iterator[tuple[str, memoryview]]:
        """(digest, bytes) of every wanted piece, once each; reads only tensors that hold one."""
        entries = {entry.name: entry for entry in self.manifest.tensors}
        left = set(wanted)
        for names, read in self.groups:
            if left.isdisjoint(p.digest for name in names for p in entries[name].pieces):
                continue
            for name, array in read().items():
                flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
                for index, piece in enumerate(entries[name].pieces):
                    if piece.digest in left:
                        left.remove(piece.digest)
                        start = index * PIECE_BYTES
                        yield piece.digest, flat[start : start + piece.nbytes].data


def _tensor_groups(layout: ShardLayout, source: WeightSource, recipe: Recipe) -> Iterator[_Group]:
    """The shard file's tensors in order, in groups that are read together."""
    if layout.embedding:
        yield ("embedding",), lambda: {"embedding": source.table("embedding", layout.embedding)}

    def table(number: int, rows: range) -> dict[str, NDArray[Any]]:
        return {token_table(number): source.table("token_table", rows, layout.token_columns)}

    for number, rows in enumerate(layout.token_tables):
        yield (token_table(number),), partial(table, number, rows)

    def read(matrix: StoredMatrix) -> dict[str, NDArray[Any]]:
        found = recipe.read(matrix, source)
        return {f"{matrix.name}.{a.suffix}": found[a.suffix] for a in matrix.arrays}

    for matrix in recipe.all_stored(layout.matrices):
        yield tuple(f"{matrix.name}.{a.suffix}" for a in matrix.arrays), partial(read, matrix)
    for vector in layout.vectors:
        yield (vector.name,), partial(lambda each: {each.name: source.vector(each)}, vector)


def _prefixed(group: _Group) -> _Group:
    """A group of the further head, by the names in the shard's file."""
    names, read = group
    return (
        tuple(f"{PREFIX}{name}" for name in names),
        lambda: {f"{PREFIX}{name}": array for name, array in read().items()},
    )


def describe_shard(
    layout: ShardLayout,
    source: WeightSource,
    weight_format: WeightFormat,
    further: tuple[FurtherHead, WeightSource] | None = None,
    *,
    fingerprint: str,
    cache_root: Path,
    on_progress: Callable[[int, int], None],
) -> ShardShipment:
    """The shard's manifest, from the cache or by hashing every byte of the shard.

    Raises CheckpointError for damaged files.
    """
    groups = list(_tensor_groups(layout, source, weight_format.recipe))
    facts: tuple[object, ...] = fingerprint, weight_format.storage, layout
    if further is not None:
        head, weights = further
        own = _tensor_groups(head.layout, weights, head.weight_format.recipe)
        groups += map(_prefixed, own)
        facts = *facts, head.weight_format.storage, head.layout
    key = hashlib.sha256(repr(facts).encode()).hexdigest()
    path = cache_root / f"{key}.json"
    with contextlib.suppress(OSError, StoreError):
        manifest = Manifest.read(path)
        return ShardShipment(manifest, groups, path)
    builder = ManifestBuilder()
    try:
        for done, (_names, read) in enumerate(groups):
            on_progress(done, len(groups))
            for name, array in read().items():
                builder.add(name, array)
    except StoreError as error:
        raise CheckpointError(str(error)) from error
    on_progress(len(groups), len(groups))
    manifest = builder.build()
    with contextlib.suppress(OSError):  # without the file, only the next load takes longer
        write_whole(path, manifest.to_json())
    return ShardShipment(manifest, groups, path)


async def ship(
    shipment: ShardShipment,
    connect: Callable[[], Awaitable[PeerClient]],
    *,
    peer: str,
    on_progress: OnProgress,
) -> tuple[PeerClient, int]:
    """Send a peer the missing pieces of its shard. Returns its client and the bytes sent.

    A broken connection is replaced and continues where the peer stopped. Raises PeerLostError after
    MAX_RECONNECTS failures without progress, or if the peer leaves; CheckpointError if the peer
    finds a piece damaged.
    """
    sent_bytes = 0
    failures = 0
    client: PeerClient | None = None
    lost: Exception | None = None

    def on_sent(nbytes: int, total_bytes: int) -> None:
        nonlocal sent_bytes, failures, lost
        sent_bytes += nbytes
        failures, lost = 0, None
        on_progress(Progress(phase="send", peer=peer, done=sent_bytes, total=total_bytes))

    while True:
        try:
            client = await connect()
            await _offer_and_send(client, shipment, on_sent, sent_before=sent_bytes)
        except BaseException as error:
            if client is not None:
                await client.aclose()
            if isinstance(error, CheckpointError):
                shipment.forget()
            if not isinstance(error, PeerLostError | NetworkError):
                raise
            if client is not None and client.is_leaving:
                raise PeerLostError(peer, IT_LEAVES) from error
            lost = lost or error
            failures += 1
            if failures > MAX_RECONNECTS:
                raise PeerLostError(peer, _reason(lost)) from error
            await asyncio.sleep(FIRST_DELAY_S * 2 ** (failures - 1))
        else:
            return client, sent_bytes


async def _offer_and_send(
    client: PeerClient,
    shipment: ShardShipment,
    on_sent: Callable[[int, int], None],
    *,
    sent_before: int,
) -> None:
    manifest = shipment.manifest
    missing = frozenset((await client.call(Offer(manifest=manifest))).digests)
    sizes = {piece.digest: piece.nbytes for _offset, piece in manifest.placements()}
    total_bytes = sent_before + sum(sizes.get(digest, 0) for digest in missing)
    async with contextlib.aclosing(_send_pieces(client, shipment, missing)) as sent:
        async for nbytes in sent:
            on_sent(nbytes, total_bytes)
            if client.is_leaving:
                raise PeerLostError(client.name, IT_LEAVES)
    await client.call(Seal(manifest=manifest.digest))


def _reason(error: Exception) -> str:
    """An error's message without the peer's name before it."""
    return re.sub(r"^peer [^:]*: ", "", str(error))


async def _send_pieces(
    client: PeerClient,
    shipment: ShardShipment,
    missing: frozenset[str],
) -> AsyncGenerator[int, None]:
    """Send the pieces, a few ahead of their confirmation; yields the size of each."""
    pieces = shipment.pieces(missing) if missing else iter(())
    manifest = shipment.manifest.digest
    flying: set[asyncio.Task[int]] = set()
    landed: set[asyncio.Task[int]] = set()

    async def send(digest: str, content: memoryview) -> int:
        await client.call(Piece(manifest=manifest, digest=digest, content=content))
        return content.nbytes

    try:
        while True:
            piece = await run_blocking(lambda: next(pieces, None))
            if piece is not None:
                flying.add(asyncio.create_task(send(*piece)))
            while flying and (piece is None or len(flying) >= PIECES_IN_FLIGHT):
                landed, flying = await asyncio.wait(flying, return_when=asyncio.FIRST_COMPLETED)
                for task in landed:
                    yield task.result()
            if piece is None:
                return
    except StoreError as error:
        raise CheckpointError(str(error)) from error
    finally:
        for task in flying:
            task.cancel()
        await asyncio.gather(*flying, *landed, return_exceptions=True)
