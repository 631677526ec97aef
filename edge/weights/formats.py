"""The number formats that weights are held in, by name.

A format is a file with its encoding, and its line in the table here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, get_args

from edge.errors import RequestError, shown
from edge.weights.block_matrices import Blocks, integers
from edge.weights.float_matrices import Floats, float32
from edge.weights.matrix_kind import Encoding, MatrixKind, OpenSource
from kernels.matmul_nbits.reference import Accuracy

ENCODINGS: dict[str, Callable[[int], Encoding]] = {
    "float32": float32,
    "int8": partial(integers, 8),
    "int4": partial(integers, 4),
}
DTYPES = tuple(ENCODINGS)
"""Number formats of weights."""
BLOCK_SIZES = (16, 32, 64, 128)
DEFAULT_BLOCK_SIZE = 32
ACCURACIES: tuple[Accuracy, ...] = get_args(Accuracy)
KvDtype = Literal["float32", "int8", "int4"]
"""Number formats of keys and values."""
KV_DTYPES: tuple[KvDtype, ...] = get_args(KvDtype)


KINDS: dict[str, type[MatrixKind[Any]]] = {"floats": Floats, "blocks": Blocks}
"""What peers have products for."""

_LONGEST_NAME = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """What peers are told of a format; its name is for people."""

    name: str
    kind: MatrixKind[Any]
    """The kind of its matrices."""
    accuracy: Accuracy
    """How products with integer weights are computed; float32 knows one way only."""
    open_source: OpenSource | None = field(default=None, compare=False, repr=False)
    """Makes it of a checkpoint; None on a peer, which is told of formats it need not know."""

    @property
    def storage(self) -> tuple[str, MatrixKind[Any]]:
        """The part that decides the bytes on disk; formats with the same storage share them."""
        return self.name, self.kind

    @property
    def rounds_inputs(self) -> bool:
        """Whether products round their inputs to 8 bits."""
        return self.kind.can_round_inputs and self.accuracy == "fast"

    def to_json(self) -> dict[str, Any]:
        """Built-in types only."""
        (kind,) = (name for name, each in KINDS.items() if each is type(self.kind))
        numbers = {each: getattr(self.kind, each) for each in self.kind.numbers}
        return {"name": self.name, "accuracy": self.accuracy, "kind": kind, **numbers}

    @classmethod
    def from_json(cls, value: Any) -> WeightFormat:
        """Raises RequestError for anything else than `to_json` wrote."""
        named = value.get("kind") if isinstance(value, Mapping) else None
        if not isinstance(named, str) or named not in KINDS:
            raise RequestError(f"matrices are {shown(named)}, not {' or '.join(KINDS)}")
        kind = KINDS[named]
        if set(value) != {"name", "accuracy", "kind", *kind.numbers}:
            raise RequestError("a weight format with other fields than it has")
        name = value["name"]
        if not (isinstance(name, str) and name.isprintable() and 0 < len(name) <= _LONGEST_NAME):
            raise RequestError("a weight format without a name")
        numbers = [value[each] for each in kind.numbers]
        if any(type(number) is not int for number in numbers):
            raise RequestError("a weight format whose numbers are not whole")
        try:
            return cls(name=name, kind=kind(*numbers), accuracy=_accuracy(value["accuracy"]))
        except ValueError as error:
            raise RequestError(str(error)) from error


def weight_format(
    name: str, block_size: int = DEFAULT_BLOCK_SIZE, accuracy: str = "fast"
) -> WeightFormat:
    """Raises RequestError for an unknown name, block size or accuracy."""
    if name not in ENCODINGS:
        raise RequestError(f"dtype {name!r} is not one of {', '.join(ENCODINGS)}")
    if type(block_size) is not int or block_size not in BLOCK_SIZES:
        raise RequestError(f"block size {block_size} is not one of {BLOCK_SIZES}")
    made = ENCODINGS[name](block_size)
    return WeightFormat(
        name=name, kind=made.kind, accuracy=_accuracy(accuracy), open_source=made.open
    )


def _accuracy(name: object) -> Accuracy:
    for known in ACCURACIES:
        if name == known:
            return known
    raise RequestError(f"accuracy {name!r:.80} is not one of {', '.join(ACCURACIES)}")


def kv_dtype(name: str) -> KvDtype:
    """Raises RequestError for an unknown name."""
    for known in KV_DTYPES:
        if name == known:
            return known
    raise RequestError(f"KV cache of {name!r}: not one of {', '.join(KV_DTYPES)}")


def kv_bits(dtype: KvDtype) -> int | None:
    """Bits of a code; None for float32."""
    return {"float32": None, "int8": 8, "int4": 4}[dtype]
