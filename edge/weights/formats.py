"""The number formats weights are held in, and what a format makes of a slice.

A format turns a MatrixSlice into named tensors; adding one (GPTQ, AWQ, GGUF grids) means adding a
WeightSource here and the nodes for it in each back end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from edge.errors import RequestError
from edge.models.parts import MatrixSlice, VectorSlice
from edge.weights.quantize import QuantizedStore
from edge.weights.weight_limits import check_weights, largest_of
from kernels.matmul_nbits.reference import Accuracy
from offload import WeightStore

_BITS: dict[str, int | None] = {"float32": None, "int8": 8, "int4": 4}
DTYPES = tuple(_BITS)
"""Number formats of weights."""
BLOCK_SIZES = (16, 32, 64, 128)
DEFAULT_BLOCK_SIZE = 32
ACCURACIES: tuple[Accuracy, ...] = get_args(Accuracy)
KvDtype = Literal["float32", "int8", "int4"]
"""Number formats of keys and values."""
KV_DTYPES: tuple[KvDtype, ...] = get_args(KvDtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """`bits` is None for float32; else weights are integers in blocks of `block_size` columns."""

    name: str
    bits: int | None
    block_size: int
    accuracy: Accuracy
    """How products with integer weights are computed; float32 knows one way only."""

    @property
    def storage(self) -> tuple[str, int]:
        """The part that decides the bytes on disk; formats with the same storage share them."""
        return self.name, self.block_size

    @property
    def tensor_suffixes(self) -> tuple[str, ...]:
        """Endings of the tensors that a matrix is stored as in a shard's file."""
        return ("weight",) if self.bits is None else ("codes", "scales")

    @property
    def packed_bytes_per_weight(self) -> float:
        """Bytes of one weight as the CPU kernels keep it.

        The integer kernels keep a float scale and a float sum for each block.
        """
        return 4.0 if self.bits is None else self.bits / 8 + 8.0 / self.block_size

    def to_json(self) -> dict[str, str | int]:
        """Built-in types only."""
        return {"dtype": self.name, "block_size": self.block_size, "accuracy": self.accuracy}

    @classmethod
    def from_json(cls, value: Any) -> WeightFormat:
        """Raises RequestError, KeyError or TypeError for anything else than `to_json` wrote."""
        return weight_format(value["dtype"], value["block_size"], value["accuracy"])


def weight_format(
    name: str, block_size: int = DEFAULT_BLOCK_SIZE, accuracy: str = "fast"
) -> WeightFormat:
    """Raises RequestError for an unknown name, block size or accuracy."""
    if name not in _BITS:
        raise RequestError(f"dtype {name!r} is not one of {', '.join(DTYPES)}")
    if type(block_size) is not int or block_size not in BLOCK_SIZES:
        raise RequestError(f"block size {block_size} is not one of {BLOCK_SIZES}")
    for known in ACCURACIES:
        if accuracy == known:
            return WeightFormat(name=name, bits=_BITS[name], block_size=block_size, accuracy=known)
    raise RequestError(f"accuracy {accuracy!r} is not one of {', '.join(ACCURACIES)}")


def kv_dtype(name: str) -> KvDtype:
    """Raises RequestError for an unknown name."""
    for known in KV_DTYPES:
        if name == known:
            return known
    raise RequestError(f"KV cache of {name!r}: not one of {', '.join(KV_DTYPES)}")


def kv_bits(dtype: KvDtype) -> int | None:
    """Bits of a code; None for float32."""
    return _BITS[dtype]


class WeightSource(Protocol):
    """Reads slices of one checkpoint in one format; reads no more than the slice needs."""

    def matrix(self, part: MatrixSlice) -> dict[str, NDArray[Any]]:
        """The tensors that stand for the slice, by suffix (`weight`, or `codes` and `scales`)."""
        ...

    def vector(self, part: VectorSlice) -> NDArray[np.float32]: ...

    def embedding(self, rows: range) -> NDArray[Any]:
        """Rows of the table in the checkpoint's own float type."""
        ...

    def close(self) -> None:
        """Let go of files this source opened; the checkpoint itself stays open."""
        ...


class FloatSource:
    """float32, widened from whatever the checkpoint holds.

    Reading raises CheckpointError for weights that no model has.
    """

    def __init__(self, store: WeightStore, tensor_name: Callable[[str], str]) -> None:
        self._store = store
        self._tensor_name = tensor_name

    def matrix(self, part: MatrixSlice) -> dict[str, NDArray[Any]]:
        pieces = [self._read(role, rows=rows, columns=part.columns) for role, rows in part.parts]
        return {"weight": pieces[0] if len(pieces) == 1 else np.concatenate(pieces)}

    def vector(self, part: VectorSlice) -> NDArray[np.float32]:
        return np.concatenate([self._read(role, rows=rows) for role, rows in part.parts])

    def embedding(self, rows: range) -> NDArray[Any]:
        name = self._tensor_name("embedding")
        values = self._store.read(name, rows=rows)
        check_weights(self._store, name, largest_of(values))
        return values

    def close(self) -> None:
        """Nothing of its own is open."""

    def _read(self, role: str, *, rows: range, columns: range | None = None) -> NDArray[np.float32]:
        name = self._tensor_name(role)
        values = self._store.read(name, rows=rows, columns=columns).astype(np.float32, copy=False)
        check_weights(self._store, name, largest_of(values))
        return values


class QuantizedSource:
    """int8 or int4 matrices from the quantised cache; the rest as float32."""

    def __init__(
        self,
        floats: FloatSource,
        quantized: QuantizedStore,
        tensor_name: Callable[[str], str],
    ) -> None:
        self._floats = floats
        self._quantized = quantized
        self._tensor_name = tensor_name

    def matrix(self, part: MatrixSlice) -> dict[str, NDArray[Any]]:
        role, rows = part.parts[0]
        name = self._tensor_name(role)
        whole_rows, whole_columns = self._quantized.matrix(name)
        if len(part.columns) != whole_columns:
            assert rows == range(whole_rows)
            assert len(part.parts) == 1
            matrix, _padding = self._quantized.columns(name, part.columns)
            return {"codes": matrix.codes, "scales": matrix.scales}
        pieces = [self._quantized.rows(self._tensor_name(r), rows) for r, rows in part.parts]
        return {
            "codes": np.concatenate([piece.codes for piece in pieces]),
            "scales": np.concatenate([piece.scales for piece in pieces]),
        }

    def vector(self, part: VectorSlice) -> NDArray[np.float32]:
        return self._floats.vector(part)

    def embedding(self, rows: range) -> NDArray[Any]:
        return self._floats.embedding(rows)

    def close(self) -> None:
        self._quantized.close()
