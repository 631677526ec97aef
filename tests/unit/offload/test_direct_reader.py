"""Bytes of a file past the page cache, on real files: as they were written, or an error."""

from pathlib import Path

import numpy as np
import pytest

from edge.offload import DirectReader, Read, StoreCorruptError, StoreError, piece_digest
from tests.support.streamed_extents import PAGE, page_memory


@pytest.fixture
def weights(tmp_path: Path) -> tuple[Path, np.ndarray]:
    content = np.random.default_rng(1).integers(256, size=3 * PAGE + 100, dtype=np.uint8)
    path = tmp_path / "weights"
    path.write_bytes(content.tobytes())
    return path, content


def test_reads_a_file_in_parallel(weights: tuple[Path, np.ndarray]) -> None:
    path, content = weights
    reader = DirectReader(path, threads=3)
    memory = page_memory(4 * PAGE)
    reads = [
        Read(0, memory[:PAGE], PAGE, piece_digest(content[:PAGE].data)),
        Read(PAGE, memory[PAGE : 3 * PAGE], 2 * PAGE),
        Read(3 * PAGE, memory[3 * PAGE :], 100, piece_digest(content[3 * PAGE :].data)),
    ]
    try:
        reader.read(reads)
        assert bytes(memory[: len(content)]) == content.tobytes()
        assert reader.bytes_read == 4 * PAGE
    finally:
        reader.close()


def test_other_bytes_than_were_written_are_refused(weights: tuple[Path, np.ndarray]) -> None:
    path, _content = weights
    reader = DirectReader(path)
    try:
        with pytest.raises(StoreCorruptError, match="other bytes at 0"):
            reader.read([Read(0, page_memory(PAGE), PAGE, "0" * 64)])
    finally:
        reader.close()


@pytest.mark.parametrize("left_bytes", [PAGE, PAGE + 904], ids=["block", "within a block"])
def test_a_file_cut_short_is_refused(weights: tuple[Path, np.ndarray], left_bytes: int) -> None:
    path, _content = weights
    reader = DirectReader(path)
    with path.open("r+b") as file:
        file.truncate(left_bytes)
    try:
        with pytest.raises(StoreCorruptError, match="ends before byte"):
            reader.read([Read(0, page_memory(2 * PAGE), 2 * PAGE)])
    finally:
        reader.close()


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot be read"):
        DirectReader(tmp_path / "nothing")
