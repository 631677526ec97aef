"""Tensors as bytes, and bytes from outside."""

from __future__ import annotations

import json

import numpy as np
import pytest

from edge.graphs.tensors import DTYPES, pack, unpack


@pytest.mark.parametrize("dtype", sorted(DTYPES - {"string"}))
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_every_type_and_shape_comes_back(dtype: str, shape: tuple[int, ...]) -> None:
    array = (np.arange(np.prod(shape, dtype=int)) % 2).astype(dtype).reshape(shape)
    (found,) = unpack(pack({"a": array}))[0].values()
    assert found.dtype == array.dtype
    np.testing.assert_array_equal(found, array)


def test_strings_and_other_values_come_back() -> None:
    words = np.array([["ä", ""], ["two words", "\0"]], object)
    arrays, others = unpack(pack({"w": words, "x": np.ones(2, ">f4")}, number=3))
    assert others == {"number": 3}
    np.testing.assert_array_equal(arrays["w"], words)
    np.testing.assert_array_equal(arrays["x"], [1, 1])


def test_types_that_do_not_travel_are_refused() -> None:
    with pytest.raises(ValueError, match="complex128"):
        pack({"a": np.ones(1, complex)})
    with pytest.raises(ValueError, match="int"):
        pack({"a": np.array([1], object)})


def blob(table: object, content: bytes = b"") -> bytes:
    head = json.dumps({"tensors": table}).encode()
    return len(head).to_bytes(4, "little") + head + content


@pytest.mark.parametrize(
    "bad",
    [
        b"", b"\xff\xff\xff\xff", b"\1\0\0\0[", blob({}),
        (99999).to_bytes(4, "little") + b"[" * 99999,
        blob([["a", ["float32"], [1], 4]], bytes(4)),
        blob([["a", "float32", [1], 8]], bytes(8)),
        blob([["a", "float32", [1 << 50], 4]], bytes(4)), blob([["a", "float32", [1], 4]]),
        blob([["a", "object", [1], 8]], bytes(8)), blob([], b"more"), blob([[]]),
        blob([["a", "float32", [-1], 4]], bytes(4)), blob([["a", "float32", [True], 4]], bytes(4)),
        blob([["a", "uint8", [0], 0], ["a", "uint8", [0], 0]]), blob([["a", "uint8", [1] * 99, 1]]),
        blob([["s", "string", [1], 4]], (9).to_bytes(4, "little")),
        blob([["s", "string", [1 << 39], 4]], bytes(4)), blob([["s", "string", [0], 4]], bytes(4)),
    ],
)  # fmt: skip
def test_other_bytes_are_refused(bad: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - JSON has errors of its own
        unpack(bad)
