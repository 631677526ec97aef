"""Pieces may arrive in any order, twice, damaged, with restarts between: the file is the same."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.offload import (
    CachedShard,
    ManifestBuilder,
    ShardCache,
    ShardWriter,
    StoreCorruptError,
    piece_digest,
)

tensors = st.lists(
    # Few letters and lengths: equal tensors, and with them equal pieces, are common.
    st.text("ab", max_size=2).map(lambda text: (text or "c").encode() * 40),
    min_size=1,
    max_size=8,
)


@settings(max_examples=60)
@given(contents=tensors, older=tensors, data=st.data())
def test_every_order_of_arrival_makes_the_same_file(
    contents: list[bytes], older: list[bytes], data: st.DataObject
) -> None:
    builder = ManifestBuilder()
    expected = bytearray()
    for index, content in enumerate(contents):
        entry = builder.add(str(index), content)
        expected.extend(bytes(entry.offset - len(expected)) + content)
    manifest = builder.build()
    pieces = {piece_digest(content): content for content in contents}
    with tempfile.TemporaryDirectory() as folder:
        cache = ShardCache(Path(folder), 1 << 30)
        fill(cache, older)
        known = set(older)
        writer = cache.begin(manifest)
        if isinstance(writer, CachedShard):
            writer.close()
            assert known >= set(contents)
        else:
            lacking = {digest for digest, content in pieces.items() if content not in known}
            deliver(writer, pieces, lacking, cache, data)
        shard = cache.get(manifest.digest, verify=True)
        assert shard is not None
        with shard:
            assert shard.path.read_bytes() == bytes(expected)


def deliver(
    writer: ShardWriter,
    pieces: dict[str, bytes],
    lacking: set[str],
    cache: ShardCache,
    data: st.DataObject,
) -> None:
    """Draws what arrives until nothing is lacking."""
    try:
        assert set(writer.missing) == lacking
        while lacking:
            digest = data.draw(st.sampled_from(sorted(pieces)))
            action = data.draw(st.sampled_from(["put", "put", "put", "damage", "restart"]))
            if action == "put":
                writer.put(digest, pieces[digest])
                lacking.discard(digest)
            elif action == "damage":
                with pytest.raises(StoreCorruptError):
                    writer.put(digest, pieces[digest][:-1] + b"!")
            else:
                writer.close()
                restarted = cache.begin(writer.manifest)
                assert isinstance(restarted, ShardWriter)
                writer = restarted
            assert set(writer.missing) == lacking
        writer.finish().close()
    finally:
        writer.close()


def fill(cache: ShardCache, contents: list[bytes]) -> None:
    builder = ManifestBuilder()
    for index, content in enumerate(contents):
        builder.add(str(index), content)
    writer = cache.begin(builder.build())
    assert isinstance(writer, ShardWriter)
    with writer:
        for content in set(contents):
            writer.put(piece_digest(content), content)
        writer.finish().close()
