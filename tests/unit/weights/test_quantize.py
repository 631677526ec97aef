"""Matrices are rounded once, and every slice of them comes out the same."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from edge.errors import CapacityError, CheckpointError
from edge.kernels.matmul_nbits.reference import quantize, slice_columns
from edge.offload import FolderCache
from edge.weights.quantize import QuantizedStore
from tests.support.quantized import MATRICES, TENSORS, assert_same, files, open_here, weight


@pytest.mark.parametrize(("bits", "block_size"), [(4, 32), (8, 64)])
def test_slices_are_slices_of_the_whole(tmp_path: Path, bits: int, block_size: int) -> None:
    with open_here(tmp_path, bits=bits, block_size=block_size) as store:
        assert store.names() == tuple(sorted(MATRICES))
        for name in MATRICES:
            rows, columns = TENSORS[name].shape
            whole = quantize(TENSORS[name], bits=bits, block_size=block_size)
            assert store.matrix(name) == (rows, columns)
            assert_same(store.rows(name, range(rows)), whole)
            some = replace(whole, codes=whole.codes[3:8], scales=whole.scales[3:8])
            assert_same(store.rows(name, range(3, 8)), some)
            for part in (range(columns), range(5), range(40, columns), range(33, 35)):
                got, left_padding = store.columns(name, part)
                expected, expected_padding = slice_columns(whole, part)
                assert_same(got, expected)
                assert left_padding == expected_padding


def test_a_chunked_matrix_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge.weights.quantize._CHUNK_WEIGHTS", 5 * 72)
    with open_here(tmp_path) as store:
        for name in MATRICES:
            whole = quantize(TENSORS[name], bits=4, block_size=32)
            assert_same(store.rows(name, range(len(whole.codes))), whole)


def test_the_files_are_ordinary_safetensors_of_a_layer_each(tmp_path: Path) -> None:
    open_here(tmp_path).close()
    names = sorted(files(tmp_path))
    assert [name.rpartition("-")[0] for name in names] == [
        "head", "model.layers.0", "model.layers.1", "model.layers.10"
    ]  # fmt: skip
    folder = next(tmp_path.glob("*-int4-32-v1"))
    with safe_open(folder / names[1], framework="numpy") as opened:
        whole = quantize(TENSORS["model.layers.0.up"], bits=4, block_size=32)
        np.testing.assert_array_equal(opened.get_tensor("model.layers.0.up.codes"), whole.codes)
        np.testing.assert_array_equal(opened.get_tensor("model.layers.0.up.scales"), whole.scales)


def test_nothing_is_rounded_twice(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    open_here(tmp_path, MATRICES[:3], progress=lambda *done: told.append(done)).close()
    total = sum(TENSORS[name].size for name in MATRICES[:3])
    assert told[0] == (0, total)
    assert told[-1] == (total, total)
    assert told == sorted(told)
    first = files(tmp_path)
    told.clear()
    open_here(tmp_path, MATRICES[1:3], progress=lambda *done: told.append(done)).close()
    assert told == []
    assert files(tmp_path) == first
    with open_here(tmp_path, MATRICES, progress=lambda *done: told.append(done)) as store:
        assert told[0] == (total, sum(TENSORS[name].size for name in MATRICES))
        assert files(tmp_path).items() > first.items()
        for name in MATRICES:
            whole = quantize(TENSORS[name], bits=4, block_size=32)
            assert_same(store.rows(name, range(len(whole.codes))), whole)


def test_formats_and_checkpoints_have_folders_of_their_own(tmp_path: Path) -> None:
    other = TENSORS | {"head": weight(70, 72)}
    prints = []
    for tensors, bits, block_size in (
        (TENSORS, 4, 32),
        (TENSORS, 8, 32),
        (TENSORS, 4, 64),
        (other, 4, 32),
    ):
        with open_here(tmp_path, tensors=tensors, bits=bits, block_size=block_size) as store:
            prints.append(store.fingerprint)
    assert len(set(prints)) == 4
    assert set(prints) == set(FolderCache(tmp_path, 0).folders())


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_tensor_that_is_not_finite_is_named(tmp_path: Path, bad: float) -> None:
    broken = TENSORS["head"].copy()
    broken[69, 71] = bad
    with pytest.raises(
        CheckpointError, match=r"tensor head in memory .*NaN or infinity.*fetch it again"
    ):
        open_here(tmp_path, tensors=TENSORS | {"head": broken})
    assert not list(tmp_path.glob("*/*.partial"))
    assert len(files(tmp_path)) == 3  # the layers before it are kept


@pytest.mark.parametrize(
    ("name", "message"),
    [("nothing", "'nothing'"), ("norm", r"norm has the shape \[72\]"), ("ids", "ids .* int64")],
)
def test_what_is_no_matrix_is_named(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_here(tmp_path, (name,))


def test_mistakes_of_the_caller(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="5 bits"):
        open_here(tmp_path, bits=5)
    with open_here(tmp_path) as store:
        with pytest.raises(ValueError, match="'norm' is not one"):
            store.matrix("norm")
        for run in (range(0, 71), range(4, 4)):
            with pytest.raises(ValueError, match="not a run"):
                store.rows("head", run)
        with pytest.raises(ValueError, match="not a run"):
            store.columns("head", range(70, 73))


def test_other_checkpoints_make_room_unless_they_are_in_use(tmp_path: Path) -> None:
    a, b, c = (TENSORS | {"head": weight(70, 72)} for _ in range(3))
    with open_here(tmp_path, tensors=a) as store:
        used = sum(path.stat().st_size for path in tmp_path.glob("*/*.safetensors"))
        limit = int(used * 1.5)
        with pytest.raises(CapacityError, match="raise the limit"):
            open_here(tmp_path, tensors=b, limit_bytes=limit)
        assert_same(store.rows("head", range(70)), quantize(a["head"], bits=4, block_size=32))
    with open_here(tmp_path, tensors=c, limit_bytes=limit) as store:
        assert FolderCache(tmp_path, 0).folders() == [store.fingerprint]


def test_threads_of_one_process_share_the_work(tmp_path: Path) -> None:
    results: list[QuantizedStore] = []
    threads = [
        threading.Thread(target=lambda: results.append(open_here(tmp_path))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 3
    assert len(files(tmp_path)) == 4
    for store in results:
        assert_same(store.rows("head", range(70)), quantize(TENSORS["head"], bits=4, block_size=32))
        store.close()


def test_no_more_threads_than_the_control_group_leaves_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []

    class Pool(ThreadPoolExecutor):
        def __init__(self, threads: int) -> None:
            started.append(threads)
            super().__init__(threads)

    monkeypatch.setattr("edge.weights.quantize.ThreadPoolExecutor", Pool)
    monkeypatch.setattr("edge.weights.quantize.usable_cores", lambda: 1)
    open_here(tmp_path).close()
    assert started == [1]
