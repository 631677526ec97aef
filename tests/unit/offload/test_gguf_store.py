"""GGUF files as weight stores: any slice of any type, rows in order, parts, and what is refused."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edge.offload import (
    GgufFile,
    GgufStore,
    StoreCorruptError,
    StoreError,
    StoreMissingError,
    StoreUnsupportedError,
    open_gguf,
)
from tests.support import gguf_bytes
from tests.support.gguf_files import Type, raw_blocks, turned

HEAD = 8

KINDS = {
    "blocks": Type.Q4_0,
    "wide": Type.Q6_K,
    "turned": Type.Q8_0,
    "halves": Type.F16,
    "brains": Type.BF16,
    "plain": Type.F32,
    "table": Type.Q5_1,
}


def write(path: Path) -> dict[str, NDArray[Any]]:
    """A tensor of each kind, and vectors; returns what they should be read as."""
    chance = np.random.default_rng(3)
    writer = gguf.GGUFWriter(path, "llama")
    expected: dict[str, NDArray[Any]] = {}
    for name, kind in KINDS.items():
        shape = (5, 70_144) if name == "wide" else (24, 96)  # wide: rows are read one by one
        values = chance.standard_normal(shape).astype(np.float32)
        raw = raw_blocks(turned(values, HEAD) if name == "turned" else values, kind)
        writer.add_tensor(name, raw, raw_dtype=kind)
        found = np.asarray(gguf.quants.dequantize(raw, kind), np.float32)
        if name == "turned":
            found = np.asarray(gguf.quants.dequantize(raw_blocks(values, kind), kind), np.float32)
        expected[name] = found.astype(
            {"halves": np.float16, "table": np.float16}.get(name, np.float32)
        )
    vector = chance.standard_normal(40).astype(np.float32)
    expected |= {"vector": vector, "turned vector": vector + 1}
    writer.add_tensor("vector", vector)
    writer.add_tensor("turned vector", turned(vector + 1, HEAD))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def opened(path: Path) -> GgufStore:
    heads = {"turned": HEAD, "turned vector": HEAD}
    return GgufStore(open_gguf(path), interleaved=heads, as_float16=["table"])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, NDArray[Any]]]:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    return path, write(path)


def test_names_shapes_types_and_whole_tensors(made: tuple[Path, dict[str, NDArray[Any]]]) -> None:
    path, expected = made
    with opened(path) as store:
        assert store.names() == tuple(sorted(expected))
        for name, tensor in expected.items():
            assert store.shape(name) == tensor.shape
            assert store.where(name) == str(path)
            found = store.read(name)
            assert found.dtype == store.dtype(name)
            assert found.flags.writeable
            assert found.flags.c_contiguous
            np.testing.assert_array_equal(found.astype(np.float32), tensor.astype(np.float32))
        assert {name: store.dtype(name).name for name in KINDS} == {
            **dict.fromkeys(KINDS, "float32"),
            "halves": "float16",
            "brains": "bfloat16",
            "table": "float16",
        }


@settings(max_examples=60)
@given(data=st.data())
def test_any_slice(made: tuple[Path, dict[str, NDArray[Any]]], data: st.DataObject) -> None:
    path, expected = made
    name = data.draw(st.sampled_from(sorted(expected)))
    tensor = expected[name]
    runs = []
    for size in tensor.shape:
        start = data.draw(st.integers(0, size))
        runs.append(range(start, data.draw(st.integers(start, size))))
    with opened(path) as store:
        found = store.read(name, *runs)
    part = tensor[tuple(slice(run.start, run.stop) for run in runs)]
    np.testing.assert_array_equal(found.astype(np.float32), part.astype(np.float32), strict=True)


def test_raw_blocks_are_in_the_order_of_rows(made: tuple[Path, dict[str, NDArray[Any]]]) -> None:
    path, expected = made
    with opened(path) as store:
        for name in ("blocks", "turned", "wide"):
            kind = store.block_type(name)
            raw = store.blocks(name, range(2, 5), range(1, 3))
            assert raw.shape == (3, 2, kind.block_bytes)
            columns = slice(kind.block_size, 3 * kind.block_size)
            np.testing.assert_array_equal(kind.dequantize(raw), expected[name][2:5, columns])


def test_mistakes_of_callers(made: tuple[Path, dict[str, NDArray[Any]]]) -> None:
    path, _expected = made
    store = opened(path)
    with pytest.raises(StoreMissingError, match="no tensor 'none'"):
        store.read("none")
    for rows, columns in ((range(25), None), (range(3, 1), None), (None, range(97))):
        with pytest.raises(ValueError, match="is not a run"):
            store.read("blocks", rows, columns)
    with pytest.raises(ValueError, match="no axis"):
        store.read("vector", range(1), range(1))
    store.close()
    store.close()
    with pytest.raises(ValueError, match="closed"):
        store.read("blocks")
    with pytest.raises(ValueError, match="no heads of 7"):
        GgufStore(open_gguf(path), interleaved={"blocks": 7})


def test_the_fingerprint_changes_with_the_file_and_with_the_order_of_rows(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(path)
    found = []
    for heads in ({}, {}, {"turned": HEAD}):
        with GgufStore(open_gguf(path), interleaved=heads) as store:
            found.append(store.fingerprint)
    assert found[0] == found[1] != found[2]
    os.utime(path, ns=(1, 1))
    with GgufStore(open_gguf(path), interleaved={}) as store:
        assert store.fingerprint not in found


def test_a_file_that_shrinks_while_it_is_open(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(path)
    with opened(path) as store:
        os.truncate(path, 3000)
        with pytest.raises(StoreCorruptError, match="while it was being read; download it again"):
            store.read("wide")


def write_parts(folder: Path, *, announced: int | None = None) -> list[Path]:
    """A model in three parts, as llama.cpp splits one: only the first has the metadata."""
    paths = []
    for number, (metadata, infos, data) in enumerate(gguf_bytes.parts(), start=1):
        if announced is not None:
            metadata["split.tensors.count"] = announced
        path = folder / f"tiny-{number:05}-of-00003.gguf"
        path.write_bytes(gguf_bytes.header(metadata, infos) + data)
        paths.append(path)
    return paths


def test_parts_are_one_model_whichever_is_given(tmp_path: Path) -> None:
    for path in write_parts(tmp_path):
        with GgufStore(files := open_gguf(path), interleaved={}) as store:
            assert files[0].metadata["general.architecture"] == "llama"
            for name, tensor in gguf_bytes.tensors().items():
                np.testing.assert_array_equal(store.read(name), tensor)


def test_parts_that_are_missing_renamed_or_of_another_model(tmp_path: Path) -> None:
    paths = write_parts(tmp_path)
    second = paths[1].read_bytes()
    paths[1].unlink()
    with pytest.raises(StoreMissingError, match=r"tiny-00002-of-00003\.gguf is missing.*3 parts"):
        open_gguf(paths[0])
    paths[1].write_bytes(paths[2].read_bytes())
    with pytest.raises(StoreCorruptError, match="does not say that it is part 2 of 3"):
        open_gguf(paths[0])
    paths[1].write_bytes(second)
    paths[0].rename(tmp_path / "other.gguf")
    with pytest.raises(StoreCorruptError, match="give the parts the names"):
        open_gguf(tmp_path / "other.gguf")
    with pytest.raises(StoreMissingError, match=r"tiny-00001-of-00003\.gguf is missing"):
        open_gguf(paths[2])
    with pytest.raises(StoreCorruptError, match="another number of tensors"):
        open_gguf(write_parts(tmp_path, announced=5)[0])


INFOS, DATA = gguf_bytes.placed(gguf_bytes.tensors())


def header(**changes: Any) -> bytes:
    return gguf_bytes.header(gguf_bytes.METADATA, INFOS, **changes) + DATA


def with_info(place: int, value: Any) -> bytes:
    infos = [list(info) for info in INFOS]
    infos[3][place] = value
    return gguf_bytes.header(gguf_bytes.METADATA, infos) + DATA


def with_value(content: bytes) -> bytes:
    """One more entry of metadata: its type and what follows."""
    whole = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + gguf_bytes.string("key") + content
    return whole + bytes(100)


HUGE = 1 << 60


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"", "does not begin with GGUF"),
        (b"PK\x03\x04" + bytes(50), "does not begin with GGUF"),
        (b"GGUF\x03", "ends within its header"),
        (header(version=1), "version 1, and 2 and 3 are read; convert"),
        (header(version=3 << 24), "is in big-endian order; fetch the little-endian file"),
        (header(num_keys=HUGE), "announces 1,152,921,504,606,846,976 metadata entries"),
        (header(num_tensors=HUGE), "announces 1,152,921,504,606,846,976 tensors"),
        (header(num_keys=4000), "metadata entries, for which it is too short"),
        (header()[:-100], "is incomplete"),
        (header()[:300], "too short|ends within its header"),
        (with_value(struct.pack("<IQ", 8, HUGE)), "bytes, and"),
        (with_value(struct.pack("<IIQ", 9, 4, HUGE)), "announces"),
        (with_value(struct.pack("<IIQ", 9, 8, 99)), "too short"),
        (with_value(struct.pack("<IIQ", 9, 9, 1)), "nested arrays"),
        (with_value(struct.pack("<I", 77)), "of type 77, which no version"),
        (with_value(struct.pack("<IIQ", 9, 77, 1)), "of type 77, which no version"),
        (with_value(struct.pack("<IB", 7, 9)), "true or false"),
        (with_value(struct.pack("<IQ", 8, 2) + b"\xff\xfe"), "not UTF-8"),
        (with_value(struct.pack("<IIQQ", 9, 8, 1, 2) + b"\xff\xfe"), "not UTF-8"),
        (with_info(0, ""), "without a name"),
        (with_info(0, INFOS[0][0]), "twice"),
        (with_info(0, "x" * 999), "of 999 bytes"),
        (with_info(1, []), "0 dimensions"),
        (with_info(1, [1, 1, 1, 1, 1]), "5 dimensions"),
        (with_info(1, [0, 8]), "not made of blocks"),
        (with_info(1, [HUGE, HUGE]), "not made of blocks"),
        (with_info(1, [1 << 30, 1 << 30]), "is incomplete"),
        (with_info(2, 77), "of type 77, which is not known here; fetch the model in one of F32"),
        (with_info(2, 2), "not made of blocks of Q4_0"),
        (with_info(3, 7), "not aligned"),
        (with_info(3, HUGE), "is incomplete"),
        (with_info(3, (1 << 64) - 32), "is incomplete"),
        (with_info(3, 0), "within the bytes of another"),
        (
            gguf_bytes.header({**gguf_bytes.METADATA, "general.alignment": 33}, INFOS) + DATA,
            "general.alignment 33, which must be a power of two",
        ),
    ],
)
def test_damaged_headers_are_refused_with_a_sentence(
    content: bytes, cause: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(StoreError, match=cause) as caught:
        GgufFile(path)
    assert str(caught.value).startswith(str(path))
    assert ";" in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_key_twice(tmp_path: Path) -> None:
    entry = gguf_bytes.string("key") + struct.pack("<IB", 0, 1)
    (tmp_path / "x").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + entry + entry)
    with pytest.raises(StoreCorruptError, match="the key 'key' twice"):
        GgufFile(tmp_path / "x")


def test_tensors_that_are_not_read_are_refused_when_they_are_asked_for(tmp_path: Path) -> None:
    infos = [["codes", [256, 2], 19, 0], ["cube", [4, 2, 2, 2], 0, 160], ["plain", [8], 0, 288]]
    (tmp_path / "x").write_bytes(gguf_bytes.header({}, infos) + bytes(400))
    with GgufStore(open_gguf(tmp_path / "x"), interleaved={}) as store:
        assert store.names() == ("codes", "cube", "plain")
        with pytest.raises(StoreUnsupportedError, match=r"codes .*IQ1_S.* in one of F32, F16"):
            store.dtype("codes")
        with pytest.raises(StoreUnsupportedError, match="stacks of matrices are read"):
            store.read("cube")
        assert store.read("plain").tolist() == [0.0] * 8


def test_stacked_matrices(tmp_path: Path) -> None:
    cube = np.arange(3 * 4 * 8, dtype=np.float32).reshape(3, 4, 8)
    infos, data = gguf_bytes.placed({"cube": cube})
    (tmp_path / "x").write_bytes(gguf_bytes.header({}, infos) + data)
    with GgufStore(open_gguf(tmp_path / "x"), interleaved={}) as store:
        assert store.shape("cube") == (3, 4, 8)
        np.testing.assert_array_equal(store.read("cube"), cube)
        np.testing.assert_array_equal(store.read("cube", range(1, 3), range(3)), cube[1:, :3])
        assert store.read("cube", range(0), range(3)).shape == (0, 3, 8)
        raw = store.blocks("cube", range(3, 6), range(2, 4))  # through both of two matrices
        found = raw.view(np.float32)[..., 0]
        np.testing.assert_array_equal(found, cube.reshape(12, 8)[3:6, 2:4])
        with pytest.raises(ValueError, match="not a run within an axis of size 4"):
            store.read("cube", range(1), range(5))


def make_nothing(path: Path) -> None:
    """It is not there."""


@pytest.mark.parametrize("make", [make_nothing, Path.mkdir, os.mkfifo])
def test_what_is_no_file(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / "model.gguf")
    with pytest.raises(StoreError, match=r"model\.gguf"):
        GgufFile(tmp_path / "model.gguf")


def test_a_large_vocabulary_is_read(tmp_path: Path) -> None:
    tokens = [f"token {number}" for number in range(150_000)]
    metadata = {"tokens": tokens, "merges": tokens, "scores": list(range(150_000))}
    (tmp_path / "x").write_bytes(gguf_bytes.header(metadata, []))
    with GgufFile(tmp_path / "x") as file:
        assert file.metadata["tokens"] == tuple(tokens)
        assert len(file.metadata["scores"]) == len(tokens)  # type: ignore[arg-type]


def test_strings_without_end_are_refused_before_they_are_read(tmp_path: Path) -> None:
    empty = struct.pack("<IQ", 8, 1 << 20) + bytes(8 << 20)
    content = b"GGUF" + struct.pack("<IQQ", 3, 0, 3)
    content += b"".join(
        gguf_bytes.string(key) + struct.pack("<I", 9) + empty for key in ("a", "b", "c")
    )
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(StoreCorruptError, match=r"more than 2,097,152 strings"):
        GgufFile(tmp_path / "x")
