"""What no reader of JSON should take, and files that have no end, are refused at once."""

import os
from pathlib import Path

import pytest

from edge.offload import parse_json, read_file


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (b"", "Expecting value"),
        (b"\xff", "utf-8"),
        ("\ufeff{}".encode(), "BOM"),
        (b'{"a": {"b": 1, "b": 2}}', "'b' twice"),
        (b"[NaN]", "NaN"),
        (b"[-Infinity]", "-Infinity"),
        (b"[-1e999]", "-1e999"),
        (b"9" * 4301, "4300 digits"),
        (b"[" * 65 + b"]" * 65, "nested deeper than 64"),
        (b"[" * 500_000, "nested too deeply"),
        (b'{"a":' * 300_000, "nested too deeply"),
        (b"[" + b"0," * 1_000_000 + b"0]", "1,000,001 values are more"),
    ],
)
def test_what_is_refused(text: bytes, cause: str) -> None:
    with pytest.raises(ValueError, match=cause):
        parse_json(text)


def test_what_is_read() -> None:
    deep = "[" * 62 + "]" * 62
    assert parse_json(f'{{"é": [1.5, {deep}], "digits": {"1" * 31}}}'.encode())["digits"] == int(
        "1" * 31
    )
    assert parse_json("[1, 2]", most_values=2) == [1, 2]
    with pytest.raises(ValueError, match="3 values are more than 2"):
        parse_json("[1, 2, 3]", most_values=2)


def test_files_are_read_up_to_a_size(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    assert read_file(tmp_path / "file", 5) == b"12345"
    with pytest.raises(ValueError, match="5 bytes are more than 4"):
        read_file(tmp_path / "file", 4)
    with pytest.raises(FileNotFoundError):
        read_file(tmp_path / "none", 4)


def test_pipes_and_devices_are_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "endless").symlink_to("/dev/zero")
    for name in ("pipe", "endless"):
        with pytest.raises(ValueError, match="not a regular file"):
            read_file(tmp_path / name, 1 << 20)
    with pytest.raises(IsADirectoryError):
        read_file(tmp_path, 1 << 20)
