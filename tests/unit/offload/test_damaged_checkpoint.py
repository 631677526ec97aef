"""Checkpoint files that are cut off, wrong or hostile are refused with a sentence."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from edge.offload import (
    SafetensorsStore,
    StoreCorruptError,
    StoreError,
    StoreMissingError,
    StoreUnsupportedError,
)

TENSORS = {
    "matrix": np.arange(70, dtype=np.float32).reshape(7, 10),
    "long": np.ones((500, 64), np.float16),
    "vector": np.arange(5, dtype=np.float32),
}


def write_shards(folder: Path) -> dict[str, str]:
    weight_map: dict[str, str] = {}
    for file, members in (
        ("model-1.safetensors", ["long"]),
        ("model-2.safetensors", ["matrix", "vector"]),
    ):
        save_file({name: TENSORS[name] for name in members}, folder / file)
        weight_map |= dict.fromkeys(members, file)
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: object) -> None:
    text = json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)


def header(tensors: object, data: bytes = b"") -> bytes:
    text = tensors if isinstance(tensors, bytes) else json.dumps(tensors).encode()
    return len(text).to_bytes(8, "little") + text + data


def described(**changes: object) -> dict[str, object]:
    return {"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "only 0 bytes"),
        (b"\xff" * 20, "announces a header"),
        ((100).to_bytes(8, "little") + b"{}", "announces a header of 100"),
        (header(b"nonsense"), "not JSON"),
        (header(b"[" * 100_000), "not JSON"),
        (header(b'{"t":\xff}'), "not JSON"),
        (header([]), "not a table"),
        (header({"t": 3}), "no description"),
        (header(described(shape=[-2]), bytes(8)), "describes 't' wrongly"),
        (header(described(shape=[True, 2]), bytes(8)), "describes 't' wrongly"),
        (header(described(shape=[1] * 65), bytes(8)), "describes 't' wrongly"),
        (header(described(shape=[0, 1 << 62]), bytes(8)), "describes 't' wrongly"),
        (header(described(data_offsets=[0]), bytes(8)), "outside the file"),
        (header(described(data_offsets=[8, 0]), bytes(8)), "outside the file"),
        (header(described(data_offsets=[0, 1 << 40]), bytes(8)), "outside the file"),
        (header(described(), bytes(7)), "outside the file"),
        (header(described(), bytes(9)), "has .* bytes but its header needs"),
        (header(described(shape=[3]), bytes(8)), "8 bytes are not a tensor 't' of F32"),
        (header({"__metadata__": {"format": "pt"}}), "no tensors"),
        (header(b'{"t":1,"t":2}'), "'t' twice"),
        (header(described() | {"u": described()["t"]}, bytes(8)), "'[tu]' begins at byte"),
        (header(described(data_offsets=[4, 12]), bytes(12)), "'t' begins at byte"),
        (header(described(dtype="F32\x1b[2J"), bytes(8)), "describes 't' wrongly"),
        (header({"": described()["t"]}, bytes(8)), "without a name"),
        (header({"t" * 1001: described()["t"]}, bytes(8)), "without a name"),
        (
            header(b'{"\\ud800":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}', bytes(4)),
            "a name",
        ),
        (header(described(shape=[1 << 48] * 3), bytes(8)), "8 bytes are not a tensor"),
        (header(b'{"t":NaN}'), "NaN"),
        (header(b'{"t":' + b"1" * 400_000 + b"}"), "4300 digits"),
        (header(b'{"t":' + b"[" * 65 + b"]" * 65 + b"}"), "nested deeper"),
        (header(b"[" + b"{}," * 400_000 + b"{}]"), "values are more than"),
        (header("{}".encode("utf-16")), "not JSON"),
        (header(b" " * (33 << 20)), "longer than"),
    ],
)
def test_damaged_files(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(StoreCorruptError, match=message):
        SafetensorsStore(tmp_path)


def test_a_cut_off_download(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StoreCorruptError, match=r"download the file again"):
        SafetensorsStore(tmp_path)


def test_a_file_that_shrinks_while_open(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    with SafetensorsStore(tmp_path) as opened, path.open("r+b") as file:
        file.truncate(2000)
        with pytest.raises(StoreCorruptError, match="ended at byte"):
            opened.read("long")


def test_types_that_numpy_has_not_are_refused_when_used(tmp_path: Path) -> None:
    content = header(described(dtype="F4_NEW", shape=[16]), bytes(8))
    (tmp_path / "model.safetensors").write_bytes(content)
    with SafetensorsStore(tmp_path) as opened:
        assert opened.shape("t") == (16,)
        for ask in (opened.dtype, opened.read):
            with pytest.raises(StoreUnsupportedError, match="F4_NEW"):
                ask("t")


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(StoreMissingError, match="neither"):
        SafetensorsStore(tmp_path)
    with pytest.raises(StoreMissingError, match="neither"):
        SafetensorsStore(tmp_path / "nowhere")


def test_an_index_with_a_file_that_is_not_there(tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(StoreMissingError, match=r"model-2\.safetensors"):
        SafetensorsStore(tmp_path)


def test_headers_say_where_tensors_are(tmp_path: Path) -> None:
    """The index may name tensors that no file has, leave some out, or name the wrong file."""
    weight_map = write_shards(tmp_path)
    swapped = dict(zip(weight_map, reversed(weight_map.values()), strict=True))
    for each in ({**weight_map, "more": "model-1.safetensors"}, swapped):
        write_index(tmp_path, each)
        with SafetensorsStore(tmp_path) as opened:
            assert set(opened.names()) == TENSORS.keys()
            for name, values in TENSORS.items():
                np.testing.assert_array_equal(opened.read(name), values)
            with pytest.raises(StoreMissingError, match="'more'"):
                opened.read("more")


@pytest.mark.parametrize(
    "name",
    ["../secret", "/etc/passwd", "a/b.safetensors", "", ".", "..", "x\0y", "a\\b", 3, None, ["x"]],
)
def test_an_index_cannot_point_elsewhere(tmp_path: Path, name: object) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save_file(TENSORS, tmp_path / "secret")
    write_index(folder, {"matrix": name})
    with pytest.raises(StoreCorruptError):
        SafetensorsStore(folder)


def test_a_link_to_elsewhere_is_not_followed(tmp_path: Path) -> None:
    folder = tmp_path / "models--x" / "snapshots" / "1"
    folder.mkdir(parents=True)
    (tmp_path / "models--x" / "blobs").mkdir()
    save_file(TENSORS, tmp_path / "models--x" / "blobs" / "0f")
    save_file(TENSORS, tmp_path / "secret")
    write_index(folder, dict.fromkeys(TENSORS, "a.safetensors"))
    for link in (folder / "a.safetensors", folder / "model.safetensors"):
        link.symlink_to(Path("..", "..", "..", "secret"))
        with pytest.raises(StoreCorruptError, match=r"safetensors is a link to .*secret"):
            SafetensorsStore(folder)
        link.unlink()
        link.symlink_to(Path("..", "..", "blobs", "0f"))  # as Hugging Face's cache does
        with SafetensorsStore(folder) as opened:
            assert opened.names() == tuple(sorted(TENSORS))


def test_an_index_of_too_many_files(tmp_path: Path) -> None:
    write_index(tmp_path, {f"t{i}": f"{i}.safetensors" for i in range(501)})
    with pytest.raises(StoreCorruptError, match="names 501 files"):
        SafetensorsStore(tmp_path)


def test_headers_of_many_files_are_bounded_together(tmp_path: Path) -> None:
    for name in ("1", "2"):
        (tmp_path / name).write_bytes(
            header(json.dumps(described()).encode().ljust(17 << 20), bytes(8))
        )
    write_index(tmp_path, {"t": "1", "u": "2"})
    with pytest.raises(StoreCorruptError, match="no model is read"):
        SafetensorsStore(tmp_path)


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b'{"weight_map": []}', b"{" * 99_999])
def test_an_index_that_is_none(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "model.safetensors.index.json").write_bytes(text)
    with pytest.raises(StoreCorruptError):
        SafetensorsStore(tmp_path)


@given(content=st.binary(max_size=200))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_no_bytes_break_the_reader(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(header(content))
    with pytest.raises(StoreError):
        SafetensorsStore(tmp_path)
