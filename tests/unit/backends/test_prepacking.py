"""Packed weights of an ONNX Runtime that lays them out in another way are refused."""

from __future__ import annotations

import pytest

from edge.backends.ort.prepacking import Blob, _own_memory, _packed_places
from edge.errors import RequestError


@pytest.mark.parametrize(
    ("said", "places"),
    [
        ("MatMulNBits+42|4096;131072;0", [(4096, 131072, "0")]),
        ("DynamicQuant+7|0;64;0|4096;32;9", [(0, 64, "0"), (4096, 32, "9")]),
    ],
)
def test_places_of_packed_weights(said: str, places: list[tuple[int, int, str]]) -> None:
    assert _packed_places(said) == (said.partition("|")[0], places)


@pytest.mark.parametrize("said", ["MatMul+42", "MatMul+42|", "MatMul+42|4096", "MatMul|0;64;x"])
def test_unknown_descriptions_are_refused(said: str) -> None:
    with pytest.raises(RequestError, match=r"onnxruntime \(.*unknown way.*; give the peer more"):
        _packed_places(said)


def test_weights_that_are_not_mapped_are_refused() -> None:
    with pytest.raises(RequestError, match="does not map its packed weights"):
        _own_memory(Blob(weight="w", offset=0, nbytes=64), ())
