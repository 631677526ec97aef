"""Rows of an embedding by read: those of the shard as float32, the others zero."""

from __future__ import annotations

import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from edge.backends.embedding_rows import EmbeddingRows
from edge.backends.interface import ShardWeights
from edge.errors import CheckpointError
from edge.offload import Manifest, TensorEntry, TensorPiece, piece_digest

HIDDEN, FIRST, COUNT, OFFSET = 24, 10, 6, 4096
ROWS = range(FIRST, FIRST + COUNT)


def weights(path: Path, table: np.ndarray) -> ShardWeights:
    path.write_bytes(bytes(OFFSET) + table.tobytes())
    entry = TensorEntry(
        name="embedding", dtype=table.dtype.name, shape=table.shape, offset=OFFSET,
        nbytes=table.nbytes,
        pieces=(TensorPiece(digest=piece_digest(table.tobytes()), nbytes=table.nbytes),),
    )  # fmt: skip
    return ShardWeights(
        path=path, manifest=Manifest(tensors=(entry,), total_bytes=OFFSET + table.nbytes)
    )


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_reads_what_it_has_and_leaves_the_rest_to_others(tmp_path: Path, dtype: type) -> None:
    table: np.ndarray = np.random.default_rng(0).standard_normal((COUNT, HIDDEN)).astype(dtype)
    rows = EmbeddingRows(weights(tmp_path / "weights", table), ROWS, HIDDEN, scale=1.0)
    try:
        tokens = np.array([15, 9, 10, 16, 15, 9], np.int64)
        hidden = np.full((len(tokens), HIDDEN), np.nan, np.float32)
        rows.read_into(hidden, tokens)
        wide = table.astype(np.float32)
        zero = np.zeros(HIDDEN, np.float32)
        assert np.array_equal(hidden, [wide[5], zero, wide[0], zero, wide[5], zero])
    finally:
        rows.close()
        rows.close()


def test_adds_rows_of_positions(tmp_path: Path) -> None:
    """Unscaled, and also where the same token is there twice."""
    table: np.ndarray = np.random.default_rng(0).standard_normal((COUNT, HIDDEN), np.float32)
    places: np.ndarray = np.random.default_rng(1).standard_normal((3, HIDDEN), np.float32)
    first = weights(tmp_path / "weights", table)
    offset = first.manifest.total_bytes
    with first.path.open("ab") as file:
        file.write(places.tobytes())
    entry = TensorEntry(
        name="positions", dtype="float32", shape=(places.size,), offset=offset,
        nbytes=places.nbytes, pieces=(),
    )  # fmt: skip
    manifest = Manifest(
        tensors=(*first.manifest.tensors, entry), total_bytes=offset + places.nbytes
    )
    both = ShardWeights(path=first.path, manifest=manifest)
    rows = EmbeddingRows(both, ROWS, HIDDEN, scale=2.0)
    try:
        hidden = np.full((4, HIDDEN), np.nan, np.float32)
        rows.read_into(hidden, np.array([10, 15, 10, 9]), np.array([2, 0, 1, 2]))
        zero = np.zeros(HIDDEN, np.float32)
        expected = 2 * np.array([table[0], table[5], table[0], zero]) + places[[2, 0, 1, 2]]
        assert np.array_equal(hidden, expected)
    finally:
        rows.close()


def test_reads_what_layers_have_of_a_token_from_the_table_that_has_it(tmp_path: Path) -> None:
    """Tables of two rows, of two layers; where the same token comes twice, and from a place on."""
    first = weights(tmp_path / "weights", np.zeros((COUNT, HIDDEN), np.float32))
    whole = np.random.default_rng(0).standard_normal((5, 2 * 3)).astype(ml_dtypes.bfloat16)
    entries, offset = list(first.manifest.tensors), first.manifest.total_bytes
    with first.path.open("ab") as file:
        for number, start in enumerate((0, 2, 4)):
            part = whole[start : start + 2]
            file.write(part.tobytes())
            entries.append(
                TensorEntry(
                    name=f"token_table.{number}", dtype="bfloat16", shape=part.shape,
                    offset=offset, nbytes=part.nbytes,
                    pieces=(TensorPiece(digest=piece_digest(part.tobytes()), nbytes=part.nbytes),),
                )
            )  # fmt: skip
            offset += part.nbytes
    both = ShardWeights(
        path=first.path, manifest=Manifest(tensors=tuple(entries), total_bytes=offset)
    )
    rows = EmbeddingRows(both, ROWS, HIDDEN, scale=1.0)
    try:
        found = np.full((2, 6, 3), np.nan, np.float32)
        rows.read_layers_into(found, 1, np.array([4, 0, 3, 4]))
        assert np.isnan(found[:, [0, 5]]).all()
        wanted = whole.astype(np.float32).reshape(5, 2, 3)[[4, 0, 3, 4]]
        assert np.array_equal(found[:, 1:5], wanted.swapaxes(0, 1))
        os.truncate(first.path, offset - 1)
        with pytest.raises(CheckpointError, match=r"ends within the token_table\.2"):
            rows.read_layers_into(found, 0, np.array([4]))
    finally:
        rows.close()


def test_a_shard_without_rows_gives_zeros(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"")
    empty = ShardWeights(path=path, manifest=Manifest(tensors=(), total_bytes=0))
    rows = EmbeddingRows(empty, range(0), HIDDEN, scale=1.0)
    try:
        hidden = np.full((2, HIDDEN), np.nan, np.float32)
        rows.read_into(hidden, np.array([0, 7], np.int64))
        assert not hidden.any()
    finally:
        rows.close()


def test_a_file_cut_short_is_an_error(tmp_path: Path) -> None:
    shard = weights(tmp_path / "weights", np.ones((COUNT, HIDDEN), np.float32))
    rows = EmbeddingRows(shard, ROWS, HIDDEN, scale=1.0)
    try:
        with shard.path.open("r+b") as file:
            file.truncate(OFFSET + HIDDEN)
        with pytest.raises(CheckpointError, match="ends within the embedding"):
            rows.read_into(np.zeros((1, HIDDEN), np.float32), np.array([ROWS[-1]], np.int64))
    finally:
        rows.close()


def test_a_file_that_is_written_to_meanwhile_is_compared(tmp_path: Path) -> None:
    """Of the bytes that it had, rows are read; of others, none."""
    table: np.ndarray = np.ones((COUNT, HIDDEN), np.float32)
    shard = weights(tmp_path / "weights", table)
    rows = EmbeddingRows(shard, ROWS, HIDDEN, scale=1.0)
    hidden, token = np.zeros((1, HIDDEN), np.float32), np.array([FIRST], np.int64)
    try:
        shard.path.write_bytes(bytes(OFFSET) + table.tobytes())
        rows.read_into(hidden, token)
        assert hidden.all()
        with shard.path.open("r+b") as file:
            file.seek(OFFSET + table.nbytes - 1)
            file.write(b"x")
        with pytest.raises(CheckpointError, match="other bytes at"):
            rows.read_into(hidden, token)
    finally:
        rows.close()
