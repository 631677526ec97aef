"""Small real files with bytes changed: they are read, or the project's own errors say why not."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge.errors import EdgeError
from edge.text import Tokenizer
from edge.weights.checkpoint import Checkpoint
from offload import Manifest, ManifestBuilder, StoreError
from tests.support.checkpoints import TinyCheckpoint
from tests.support.small_tokenizers import byte_level, write_checkpoint

several = settings(
    max_examples=50,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

odd = st.sampled_from(
    [b"", b"{", b"}", b"[", b"]", b'"', b",", b":", b"\0", b"\xff", b"-", b"1e999", b"NaN", b"null",
     b"9" * 5000, b"[" * 2000, b"{}," * 100, b"18446744073709551616", b'"\\ud800"', b"../",
     b"\\u0000"]
)  # fmt: skip
changes = st.lists(
    st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 20), odd | st.binary(max_size=9)),
    min_size=1,
    max_size=4,
)
"""Where, as a share of the length; how many bytes go; what comes in their place."""

Changes = list[tuple[float, int, bytes]]


def changed(content: bytes, each: Changes) -> bytes:
    for place, gone, put in each:
        at = int(place * len(content))
        content = content[:at] + put + content[at + gone :]
    return content


def changed_in_front(content: bytes, each: Changes) -> bytes:
    """The header of weights, and little of what follows."""
    return changed(content[:4000], each) + content[4000:]


@pytest.fixture(scope="module")
def checkpoint(
    tiny_checkpoint: Callable[..., TinyCheckpoint], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("hostile") / "checkpoint"
    shutil.copytree(tiny_checkpoint("llama").path, folder)
    return folder


@contextlib.contextmanager
def replaced(path: Path, content: bytes):  # type: ignore[no-untyped-def]
    sound = path.read_bytes()
    path.write_bytes(content)
    try:
        yield
    finally:
        path.write_bytes(sound)


@several
@given(st.sampled_from(["config.json", "model.safetensors"]), changes)
def test_a_checkpoint(checkpoint: Path, file: str, each: Changes) -> None:
    path = checkpoint / file
    edit = changed_in_front if file.endswith("safetensors") else changed
    with replaced(path, edit(path.read_bytes(), each)), contextlib.suppress(EdgeError):
        Checkpoint.open(checkpoint).close()


@several
@given(st.sampled_from(["tokenizer.json", "tokenizer_config.json"]), changes)
def test_a_tokenizer(tmp_path: Path, file: str, each: Changes) -> None:
    path = tmp_path / file
    if not path.exists():
        write_checkpoint(tmp_path, byte_level(), {"bos_token": "<|begin|>"})
    with replaced(path, changed(path.read_bytes(), each)), contextlib.suppress(EdgeError):
        opened = Tokenizer.open(tmp_path)
        opened.decode(opened.encode("The quick brown fox"))


@several
@given(changes)
def test_a_manifest(each: Changes) -> None:
    builder = ManifestBuilder()
    for name in ("a", "b", "c"):
        builder.add(name, name.encode() * 100)
    with contextlib.suppress(StoreError):
        Manifest.from_json(changed(builder.build().to_json().encode(), each))
