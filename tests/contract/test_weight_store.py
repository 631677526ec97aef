"""Every WeightStore keeps the same promises; the file store refuses damaged checkpoints."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.numpy import save_file

from edge.offload import (
    MemoryStore,
    SafetensorsFile,
    SafetensorsStore,
    StoreMissingError,
    WeightStore,
)

random = np.random.default_rng(0)
TENSORS: dict[str, NDArray[Any]] = {
    "matrix": random.standard_normal((37, 50)).astype(ml_dtypes.bfloat16),
    "wide": random.standard_normal((5, 70_000)).astype(np.float32),  # rows read one by one
    "long": random.standard_normal((70_000, 64)).astype(np.float16),  # several scratch buffers
    "vector": random.standard_normal(19).astype(np.float64),
    "codes": random.integers(0, 256, (6, 7, 16), dtype=np.uint8),
    "integers": random.integers(-99, 99, (3, 4), dtype=np.int32),
    "scalar": np.array(3.5, np.float32),
    "empty": np.zeros((0, 8), np.float32),
    "flags": np.array([[True, False], [False, True]]),
}


def memory(_folder: Path) -> WeightStore:
    return MemoryStore(TENSORS)


def one_file(folder: Path) -> WeightStore:
    save_file(TENSORS, folder / "model.safetensors")
    return SafetensorsStore(folder)


def shards(folder: Path) -> WeightStore:
    write_shards(folder)
    return SafetensorsStore(folder)


def write_shards(folder: Path) -> dict[str, str]:
    names = sorted(TENSORS)
    halves = {"model-1.safetensors": names[:4], "model-2.safetensors": names[4:]}
    for file, members in halves.items():
        save_file({name: TENSORS[name] for name in members}, folder / file)
    weight_map = {name: file for file, members in halves.items() for name in members}
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: object) -> None:
    text = json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)


@pytest.fixture(params=[memory, one_file, shards])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[WeightStore]:
    make: Callable[[Path], WeightStore] = request.param
    opened = make(tmp_path)
    yield opened
    opened.close()


def test_names_shapes_and_types(store: WeightStore) -> None:
    assert store.names() == tuple(sorted(TENSORS))
    for name, tensor in TENSORS.items():
        assert store.shape(name) == tensor.shape
        assert store.dtype(name) == tensor.dtype


def test_where_a_tensor_is_can_be_told(store: WeightStore) -> None:
    for name in TENSORS:
        where = store.where(name)
        if where != "memory":
            with SafetensorsFile(Path(where)) as file:
                assert name in file.tensors


def test_whole_tensors(store: WeightStore) -> None:
    for name, tensor in TENSORS.items():
        got = store.read(name)
        assert got.dtype == tensor.dtype
        np.testing.assert_array_equal(got, tensor, strict=True)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_any_slice(store: WeightStore, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["matrix", "wide", "long", "codes", "integers", "flags"]))
    tensor = TENSORS[name]
    cuts = []
    for size in tensor.shape[:2]:
        start = data.draw(st.integers(0, size))
        cuts.append(
            data.draw(st.none() | st.builds(range, st.just(start), st.integers(start, size)))
        )
    got = store.read(name, rows=cuts[0], columns=cuts[1])
    slices = tuple(slice(None) if c is None else slice(c.start, c.stop) for c in cuts)
    np.testing.assert_array_equal(got, tensor[slices], strict=True)
    assert got.flags.c_contiguous
    assert got.flags.writeable


def test_what_is_read_is_the_callers_own(store: WeightStore) -> None:
    store.read("matrix", rows=range(3))[:] = 0
    np.testing.assert_array_equal(store.read("matrix"), TENSORS["matrix"])


@pytest.mark.parametrize(
    "run", [range(-1, 2), range(0, 38), range(5, 3), range(0, 10, 2), range(38, 38)]
)
def test_runs_outside_the_tensor_are_the_callers_mistake(store: WeightStore, run: range) -> None:
    with pytest.raises(ValueError, match="not a run"):
        store.read("matrix", rows=run)


def test_axes_that_are_not_there_are_the_callers_mistake(store: WeightStore) -> None:
    with pytest.raises(ValueError, match="no axis 1"):
        store.read("vector", columns=range(1))
    with pytest.raises(ValueError, match="no axis 0"):
        store.read("scalar", rows=range(1))


def test_unknown_names(store: WeightStore) -> None:
    for ask in (store.shape, store.dtype, store.where, store.read):
        with pytest.raises(StoreMissingError, match="'nothing'"):
            ask("nothing")


def test_reading_a_closed_store_is_an_error(store: WeightStore) -> None:
    store.close()
    store.close()
    with pytest.raises(ValueError, match="closed"):
        store.read("matrix")


def test_the_fingerprint_follows_the_content(tmp_path: Path) -> None:
    changed = TENSORS | {"vector": TENSORS["vector"] + 1}
    assert MemoryStore(TENSORS).fingerprint == MemoryStore(dict(TENSORS)).fingerprint
    assert MemoryStore(TENSORS).fingerprint != MemoryStore(changed).fingerprint
    prints: list[str] = []
    for content in (TENSORS, TENSORS, {"vector": TENSORS["vector"]}):
        if not prints or content is not TENSORS:
            save_file(content, tmp_path / "model.safetensors")
        with SafetensorsStore(tmp_path) as opened:
            prints.append(opened.fingerprint)
    assert prints[0] == prints[1] != prints[2]
    assert prints[0].isalnum()


def test_a_file_may_be_named_and_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    save_file(TENSORS, tmp_path / "blobs" / "0f")
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "blobs" / "0f")
    for path in (tmp_path, tmp_path / "model.safetensors"):
        with SafetensorsStore(path) as opened:
            np.testing.assert_array_equal(opened.read("matrix"), TENSORS["matrix"])


def test_column_slices_do_not_read_the_file(tmp_path: Path) -> None:
    """Two columns of 70,000: the kernel counts the bytes this process has read."""
    save_file(TENSORS, tmp_path / "model.safetensors")
    with SafetensorsStore(tmp_path) as opened:
        before = bytes_read()
        opened.read("wide", columns=range(4, 6))
        assert bytes_read() - before < 4096


def bytes_read() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("rchar")))
