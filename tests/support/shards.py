"""Small shards with known bytes, and what a cache makes of them."""

from pathlib import Path

import numpy as np

from edge.offload import (
    PIECE_BYTES,
    CachedShard,
    FolderCache,
    Manifest,
    ManifestBuilder,
    ShardCache,
    ShardWriter,
)
from edge.offload.cache.verified_shard import MARK_BYTES

LIMIT = 1 << 40
Content = dict[str, bytes]


def content(seed: int, count: int = 6, nbytes: int = 5000) -> Content:
    random = np.random.default_rng(seed)
    return {f"t{i}": random.bytes(nbytes) for i in range(count)}


def describe(tensors: Content) -> Manifest:
    builder = ManifestBuilder()
    for name, data in tensors.items():
        builder.add(name, data)
    return builder.build()


def size(tensors: Content) -> int:
    """Bytes of the shard's folder."""
    return describe(tensors).total_bytes + len(describe(tensors).to_json()) + MARK_BYTES


def pieces_of(tensors: Content) -> dict[str, bytes]:
    pieces = {}
    for entry in describe(tensors).tensors:
        data = tensors[entry.name]
        for index, piece in enumerate(entry.pieces):
            pieces[piece.digest] = data[index * PIECE_BYTES : (index + 1) * PIECE_BYTES]
    return pieces


def start(cache: ShardCache, tensors: Content) -> ShardWriter:
    writer = cache.begin(describe(tensors))
    assert isinstance(writer, ShardWriter)
    return writer


def fill(cache: ShardCache, tensors: Content) -> CachedShard:
    with start(cache, tensors) as writer:
        for digest in writer.missing:
            writer.put(digest, pieces_of(tensors)[digest])
        return writer.finish()


def check(shard: CachedShard | None, tensors: Content) -> None:
    """The file is exactly the tensors at their places, and zeros between them."""
    assert shard is not None
    expected = bytearray(describe(tensors).total_bytes)
    for entry in shard.manifest.tensors:
        expected[entry.offset : entry.offset + entry.nbytes] = tensors[entry.name]
    assert shard.path.read_bytes() == bytes(expected)
    assert shard.manifest == describe(tensors)
    shard.close()


def missing(cache: ShardCache, tensors: Content) -> set[str]:
    with start(cache, tensors) as writer:
        return set(writer.missing)


def shards_in(root: Path) -> int:
    return len(FolderCache(root, 0).folders())
