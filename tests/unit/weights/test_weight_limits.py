"""A weight that no model has is refused where it is read, by the names of its tensor and file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from edge.errors import CheckpointError
from edge.models.parts import MatrixSlice, VectorSlice
from edge.offload import SafetensorsStore
from edge.weights.float_matrices import FloatSource
from edge.weights.quantize import open_quantized
from edge.weights.quantized_store import QuantizedFormat
from edge.weights.weight_limits import LARGEST_WEIGHT, largest_of

ROWS, COLUMNS = range(40), range(64)
READS: dict[str, Callable[[FloatSource], object]] = {
    "matrix": lambda source: source.matrix(
        MatrixSlice(name="m", parts=(("matrix", ROWS),), columns=COLUMNS)
    ),
    "vector": lambda source: source.vector(VectorSlice(name="v", parts=(("vector", ROWS),))),
    "embedding": lambda source: source.table("embedding", ROWS),
}
BAD = {
    "nan": (np.nan, "NaN or infinite weights"),
    "inf": (-np.inf, "NaN or infinite weights"),
    "large": (-3e38, "weights as large as 3e+38, with which products overflow"),
}


def store(folder: Path, name: str, value: float, dtype: Any = np.float32) -> SafetensorsStore:
    """A checkpoint whose tensors are sound but for one value of the one called `name`."""
    random = np.random.default_rng(0)
    tensors: dict[str, NDArray[Any]] = {
        each: random.standard_normal((40,) if each == "vector" else (40, 64)).astype(dtype)
        for each in ("matrix", "vector", "embedding")
    }
    tensors[name].reshape(-1)[17] = value
    save_file(tensors, folder / "model.safetensors")
    return SafetensorsStore(folder)


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("name", READS)
def test_tensor_and_file_are_named(name: str, kind: str, tmp_path: Path) -> None:
    value, held = BAD[kind]
    with store(tmp_path, name, value) as opened:
        source = FloatSource(opened, lambda role: role)
        for other, read in READS.items():
            if other != name:
                read(source)
        with pytest.raises(CheckpointError) as refused:
            READS[name](source)
    sentence = str(refused.value)
    assert f"tensor {name} in {tmp_path / 'model.safetensors'} holds {held}" in sentence
    assert "fetch it again" in sentence


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_they_are_named_where_matrices_are_rounded(bits: int, kind: str, tmp_path: Path) -> None:
    with (
        store(tmp_path, "matrix", BAD[kind][0]) as opened,
        pytest.raises(CheckpointError, match=rf"tensor matrix in {tmp_path}/model.safetensors "),
    ):
        open_quantized(
            opened,
            ["matrix"],
            QuantizedFormat(bits=bits, block_size=32),
            cache_root=tmp_path / "cache",
        )
    assert not list(tmp_path.rglob("cache/*/*.safetensors"))


def test_what_float16_or_bfloat16_cannot_hold_is_infinite_there(tmp_path: Path) -> None:
    for dtype, value in ((np.float16, 7e4), (ml_dtypes.bfloat16, 3.4e38)):
        with (
            np.errstate(over="ignore"),
            store(tmp_path, "embedding", value, dtype) as opened,
            pytest.raises(CheckpointError, match="holds NaN or infinite weights"),
        ):
            READS["embedding"](FloatSource(opened, lambda role: role))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_the_largest_value_is_found_wherever_it_is(dtype: Any) -> None:
    for place in (0, (1 << 20) - 1, 1 << 20, (1 << 20) + 4):
        values = np.zeros((1 << 20) + 5, dtype)
        values[place] = -1024.0
        assert largest_of(values) == 1024.0
        values[place] = np.nan
        assert np.isnan(largest_of(values))
    assert largest_of(np.zeros((0, 4), dtype)) == 0.0


def test_the_largest_weight_that_is_taken_does_not_overflow() -> None:
    """Squared and summed over more columns than a model has."""
    assert np.float32(LARGEST_WEIGHT) ** 2 * np.float32(1 << 20) < np.finfo(np.float32).max
