"""Small files and names that are there as a whole, or as they were before."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors import safe_open

from edge.offload import (
    SafetensorsWriter,
    StoreError,
    StoreFullError,
    rename_durably,
    write_durably,
)


def test_a_file_is_replaced_or_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file.json"
    write_durably(path, b"first")
    write_durably(path, b"")
    write_durably(path, b"second")

    def full(descriptor: int, content: memoryview, offset: int) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("edge.offload.files.durable.write_at", full)
        with pytest.raises(StoreFullError, match=r"file\.json cannot grow"):
            write_durably(path, b"third")
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [
        ("file.json", b"second")
    ]


def test_a_folder_takes_no_name_that_is_taken(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "a").touch()
    rename_durably(tmp_path / "new", tmp_path / "named")
    assert (tmp_path / "named" / "a").is_file()
    (tmp_path / "new").mkdir()
    with pytest.raises(StoreError, match="named cannot be used"):
        rename_durably(tmp_path / "new", tmp_path / "named")


def test_a_header_says_what_else_is_to_be_said(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    writer = SafetensorsWriter(path, {"a": ("U8", (3,))}, metadata={"format": "pt"})
    with writer:
        pass
    assert path.stat().st_size == writer.total_bytes
    with safe_open(path, "np") as file:
        assert file.metadata() == {"format": "pt"}
        assert file.get_tensor("a").shape == (3,)
