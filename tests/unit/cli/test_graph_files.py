"""Arrays, pictures and sound as inputs of a graph."""

from __future__ import annotations

import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from edge.cli.graph_files import read_inputs
from edge.errors import RequestError
from edge.graphs.onnx_file import GraphValue

PIXELS = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Image.fromarray(PIXELS).save("a.png")
    np.save("a.npy", PIXELS)
    with wave.open("a.wav", "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(np.array([0, 16384, -32768], "<i2").tobytes())
    return tmp_path


def given(dtype: str, *shape: Any, file: str = "a.png") -> np.ndarray[Any, Any]:
    found = read_inputs((f"x={file}",), [GraphValue(name="x", dtype=dtype, shape=shape)])
    assert found is not None
    return found["x"]


def test_a_picture_has_the_form_of_its_input(here: Path) -> None:
    assert np.array_equal(given("uint8", "h", "w", 3), PIXELS)
    assert np.array_equal(given("uint8", "n", None, None, 3), PIXELS[None])
    first = given("float32", 1, 3, 4, 6)
    assert first.dtype == np.float32
    np.testing.assert_allclose(first[0], PIXELS.transpose(2, 0, 1) / 255, rtol=1e-6)
    resized = np.asarray(Image.fromarray(PIXELS).resize((8, 2), Image.Resampling.BILINEAR))
    assert np.array_equal(given("uint8", 1, 2, 8, 3)[0], resized)
    assert np.array_equal(given("uint8", 3, 2, 8), resized.transpose(2, 0, 1))
    grey = given("uint8", 1, "h", "w")
    assert grey.shape == (1, 4, 6)
    assert grey[0, 0, 0] == 1


def test_a_sound_has_the_form_of_its_input(here: Path) -> None:
    for rank in (1, 2, 3):
        found = given("float32", *["n"] * rank, file="a.wav")
        assert found.shape == (1,) * (rank - 1) + (3,)
        assert found.reshape(-1).tolist() == [0, 0.5, -1]
    assert np.array_equal(given("uint8", file="a.npy"), PIXELS)
    assert read_inputs((), ()) is None


@pytest.mark.parametrize(
    ("dtype", "shape", "file", "said"),
    [
        ("int64", (1, 3, 4, 6), "a.png", "is a picture, and 'x' is int64"),
        ("float32", (1, 5), "a.png", "is a picture"),
        ("int64", (3,), "a.wav", "has samples"),
        ("float32", (3,), "b.wav", "cannot be read as WAV"),
        ("uint8", (3, 4, 6), "b.png", "cannot be read"),
        ("uint8", (3, 4, 6), "false.png", "the picture cannot be read"),
        ("uint8", (3, 4, 6), "false.npy", "cannot be read as an array"),
    ],
)
def test_files_that_are_nothing_for_an_input_are_refused(
    dtype: str, shape: tuple[Any, ...], file: str, said: str, here: Path
) -> None:
    for name in ("false.png", "false.npy"):
        (here / name).write_bytes(b"none")
    with pytest.raises(RequestError, match=said):
        given(dtype, *shape, file=file)
    with pytest.raises(RequestError, match="'y' is no input"):
        read_inputs(("y=a.png",), [GraphValue(name="x", dtype="uint8", shape=(3, 4, 6))])
