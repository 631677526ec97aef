"""Matrices are rounded once, whatever interrupts it, and every slice comes out the same."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file

from edge.errors import CapacityError, CheckpointError
from edge.quantize import QuantizedStore, open_quantized
from kernels.matmul_nbits.reference import QuantizedMatrix, quantize, slice_columns, slice_rows
from offload import FolderCache, MemoryStore, SafetensorsStore

REPOSITORY = Path(__file__).parents[2]

random = np.random.default_rng(0)


def weight(rows: int, columns: int) -> NDArray[Any]:
    return random.standard_normal((rows, columns)).astype(ml_dtypes.bfloat16)


TENSORS: dict[str, NDArray[Any]] = {
    "model.layers.0.up": weight(48, 72),
    "model.layers.0.down": weight(40, 200),
    "model.layers.1.up": weight(48, 72),
    "model.layers.10.up": weight(9, 64),
    "head": weight(70, 72),
    "norm": np.ones(72, np.float32),
    "ids": np.ones((2, 2), np.int64),
}
MATRICES = tuple(name for name, tensor in TENSORS.items() if name not in {"norm", "ids"})


def open_here(
    root: Path,
    matrices: tuple[str, ...] = MATRICES,
    tensors: dict[str, NDArray[Any]] = TENSORS,
    **options: Any,
) -> QuantizedStore:
    options = {"bits": 4, "block_size": 32} | options
    return open_quantized(MemoryStore(tensors), matrices, cache_root=root, **options)


def assert_same(got: QuantizedMatrix, expected: QuantizedMatrix) -> None:
    np.testing.assert_array_equal(got.codes, expected.codes)
    np.testing.assert_array_equal(got.scales, expected.scales)
    assert (got.bits, got.block_size, got.columns) == (
        expected.bits, expected.block_size, expected.columns
    )  # fmt: skip


def files(root: Path) -> dict[str, int]:
    """{file: when it was made}."""
    return {path.name: path.stat().st_ctime_ns for path in root.glob("*/*.safetensors")}


@pytest.mark.parametrize(("bits", "block_size"), [(4, 32), (8, 64)])
def test_slices_are_slices_of_the_whole(tmp_path: Path, bits: int, block_size: int) -> None:
    with open_here(tmp_path, bits=bits, block_size=block_size) as store:
        assert store.names() == tuple(sorted(MATRICES))
        for name in MATRICES:
            rows, columns = TENSORS[name].shape
            whole = quantize(TENSORS[name], bits=bits, block_size=block_size)
            assert store.matrix(name) == (rows, columns)
            assert_same(store.rows(name, range(rows)), whole)
            assert_same(store.rows(name, range(3, 8)), slice_rows(whole, range(3, 8)))
            for part in (range(columns), range(5), range(40, columns), range(33, 35)):
                got, left_padding = store.columns(name, part)
                expected, expected_padding = slice_columns(whole, part)
                assert_same(got, expected)
                assert left_padding == expected_padding


def test_a_chunked_matrix_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge.quantize._CHUNK_WEIGHTS", 5 * 72)
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
    for tensors, options in (
        (TENSORS, {}),
        (TENSORS, {"bits": 8}),
        (TENSORS, {"block_size": 64}),
        (other, {}),
    ):
        with open_here(tmp_path, tensors=tensors, **options) as store:
            prints.append(store.fingerprint)
    assert len(set(prints)) == 4
    assert set(prints) == set(FolderCache(tmp_path, 0).folders())


@pytest.mark.parametrize("damage", [b"", b"{}", None])
def test_a_damaged_file_is_made_anew(tmp_path: Path, damage: bytes | None) -> None:
    open_here(tmp_path).close()
    first = files(tmp_path)
    path = next(tmp_path.glob("*/model.layers.0-*"))
    if damage is None:
        os.truncate(path, path.stat().st_size - 1)
    else:
        path.write_bytes(damage)
    with open_here(tmp_path) as store:
        whole = quantize(TENSORS["model.layers.0.up"], bits=4, block_size=32)
        assert_same(store.rows("model.layers.0.up", range(48)), whole)
    again = files(tmp_path)
    assert again.keys() == first.keys()
    assert [name for name in first if again[name] != first[name]] == [path.name]


def test_a_file_cut_short_while_open_is_an_error(tmp_path: Path) -> None:
    with open_here(tmp_path) as store:
        os.truncate(next(tmp_path.glob("*/head-*")), 500)
        with pytest.raises(CheckpointError, match="damaged"):
            store.rows("head", range(70))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_tensor_that_is_not_finite_is_named(tmp_path: Path, bad: float) -> None:
    broken = TENSORS["head"].copy()
    broken[69, 71] = bad
    with pytest.raises(CheckpointError, match=r"tensor head .*NaN or infinity.*fetch it again"):
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


CHILD = """
import os, signal, sys
from pathlib import Path
import numpy as np
from edge import quantize
from offload import SafetensorsStore

source, root, kill_at = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
real, written = os.pwrite, 0

def dying_pwrite(descriptor, data, offset):
    global written
    written += 1
    if written == kill_at:
        real(descriptor, data[: len(data) // 2], offset)
        os.kill(os.getpid(), signal.SIGKILL)
    return real(descriptor, data, offset)

os.pwrite = dying_pwrite
with SafetensorsStore(source) as store:
    names = [name for name in store.names() if name not in {"norm", "ids"}]
    quantize.open_quantized(store, names, bits=4, block_size=32, cache_root=root).close()
"""


def child(source: Path, root: Path, kill_at: int) -> "subprocess.Popen[bytes]":
    arguments = [str(source), str(root), str(kill_at)]
    return subprocess.Popen([sys.executable, "-c", CHILD, *arguments], cwd=REPOSITORY)


def check_all(source: Path, root: Path) -> None:
    with (
        SafetensorsStore(source) as floats,
        open_quantized(floats, MATRICES, bits=4, block_size=32, cache_root=root) as store,
    ):
        for name in MATRICES:
            whole = quantize(TENSORS[name], bits=4, block_size=32)
            assert_same(store.rows(name, range(len(whole.codes))), whole)


def test_a_killed_process_leaves_whole_files_and_no_lock(tmp_path: Path) -> None:
    source, root = tmp_path / "source", tmp_path / "root"
    source.mkdir()
    save_file(TENSORS, source / "model.safetensors")
    # Each file is one write of the header and two per matrix: the seventh is in the third file.
    with child(source, root, 7) as process:
        assert process.wait() == -signal.SIGKILL
    kept = files(root)
    assert len(kept) == 2
    assert len(list(root.glob("*/*.partial"))) == 1
    check_all(source, root)
    assert files(root).items() > kept.items()
    assert not list(root.glob("*/*.partial"))


def test_two_processes_at_once(tmp_path: Path) -> None:
    source, root = tmp_path / "source", tmp_path / "root"
    source.mkdir()
    save_file(TENSORS, source / "model.safetensors")
    with child(source, root, -1) as one, child(source, root, -1) as two:
        assert one.wait() == two.wait() == 0
    made = files(root)
    assert len(made) == 4
    check_all(source, root)
    assert files(root) == made


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
