"""A checked ONNX file: its weights, inputs and outputs, and what is known of tensors before a run.

Runs nothing. Weights outside the file (external data) are read when they are asked for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import (
    ModelProto,
    NodeProto,
    TensorProto,
    TensorShapeProto,
    ValueInfoProto,
    helper,
)

from edge.errors import CheckpointError
from edge.graphs.nodes import named

OLDEST_OPSET = 7
"""The oldest that ONNX Runtime promises to compute."""
MOST_WEIGHTS_BYTES = 1 << 40

OUTSIDE_FROM_BYTES = 4096
"""Smaller initialisers stay in the proto of a part: among them are shapes, which ONNX Runtime reads
to infer others."""

_BITS = {
    TensorProto.INT4: 4, TensorProto.UINT4: 4, TensorProto.FLOAT4E2M1: 4,
}  # fmt: skip

NUMPY_NAMES: Mapping[int, str] = {
    TensorProto.FLOAT: "float32", TensorProto.DOUBLE: "float64", TensorProto.FLOAT16: "float16",
    TensorProto.INT8: "int8", TensorProto.INT16: "int16", TensorProto.INT32: "int32",
    TensorProto.INT64: "int64", TensorProto.UINT8: "uint8", TensorProto.UINT16: "uint16",
    TensorProto.UINT32: "uint32", TensorProto.UINT64: "uint64", TensorProto.BOOL: "bool",
    TensorProto.STRING: "string",
}  # fmt: skip
"""Types that travel between devices, by their number in ONNX."""

ONNX_TYPES: Mapping[str, int] = {name: number for number, name in NUMPY_NAMES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphValue:
    """An input or output of a graph."""

    name: str
    dtype: str
    """A numpy name, or "string"."""
    shape: tuple[int | str | None, ...] | None
    """A number, the name of a free dimension, or None for one without a name; None: any shape."""

    def __str__(self) -> str:
        if self.shape is None:
            return f"{self.dtype} of any shape"
        return f"{self.dtype} [{', '.join('?' if d is None else str(d) for d in self.shape)}]"


@dataclass(frozen=True, slots=True)
class WeightPlace:
    """Where the bytes of an initialiser are in a file beside the graph's."""

    path: Path
    offset: int
    nbytes: int


class OnnxFile:
    """A graph that `open_onnx` has checked.

    Initialisers of OUTSIDE_FROM_BYTES and more are apart from the proto; `read_weight` reads one.
    """

    def __init__(self, path: Path, model: ModelProto, places: Mapping[str, WeightPlace]) -> None:
        self.path = path
        self.model = model
        self.initialisers: dict[str, TensorProto] = {
            each.name: each for each in model.graph.initializer
        }
        self._places = dict(places)

    @property
    def nodes(self) -> Sequence[NodeProto]:
        nodes: Sequence[NodeProto] = self.model.graph.node
        return nodes

    @cached_property
    def inputs(self) -> tuple[GraphValue, ...]:
        return tuple(
            _value(each, "input")
            for each in self.model.graph.input
            if each.name not in self.initialisers
        )

    @cached_property
    def outputs(self) -> tuple[GraphValue, ...]:
        return tuple(_value(each, "output") for each in self.model.graph.output)

    @cached_property
    def known_values(self) -> Mapping[str, ValueInfoProto]:
        """What is known of tensors before a run, by name: sizes only where they follow from inputs
        and weights, so that they hold for every input.

        The sizes in a file may be those of the input with which it was exported. ONNX Runtime
        computes such a tensor of any size, but refuses it as the input of a part. Without those
        that follow, it takes a part for wrong whose shape arithmetic began in another part.
        """
        graph = self.model.graph
        told = {each.name: each for each in (*graph.value_info, *graph.output)}
        found = {name: _without_sizes(each) for name, each in told.items()}
        inputs = self._given_inputs()
        names = {dim.dim_param for each in inputs for dim in each.type.tensor_type.shape.dim}
        for each in self._inferred(inputs, ()):
            if each.name not in found or each.type.tensor_type.HasField("shape"):
                found[each.name] = _joined(each, found.get(each.name), names)
        return found | {each.name: each for each in graph.input}

    def inferred_types(self) -> dict[str, int]:
        """The types of tensors between nodes, by their numbers in ONNX, where they are known before
        a run."""
        return {
            name: number
            for name, each in self.known_values.items()
            if (number := each.type.tensor_type.elem_type)
        }

    def inferred_sizes(
        self, known: Mapping[str, tuple[int, Sequence[int]]]
    ) -> dict[str, tuple[int, tuple[int, ...]]]:
        """The types and sizes of tensors between nodes, where all follow from those of weights and
        of the tensors that a run has shown, `known`. Types are numbers in ONNX."""
        seen = {name: helper.make_tensor_value_info(name, *each) for name, each in known.items()}
        inputs = [seen.pop(each.name, each) for each in self._given_inputs()]
        found = {}
        for each in self._inferred(inputs, seen.values()):
            held = each.type.tensor_type
            if held.HasField("shape") and all(n.HasField("dim_value") for n in held.shape.dim):
                found[each.name] = held.elem_type, tuple(n.dim_value for n in held.shape.dim)
        return found

    def _given_inputs(self) -> list[ValueInfoProto]:
        return [each for each in self.model.graph.input if each.name not in self.initialisers]

    def _inferred(
        self, inputs: Iterable[ValueInfoProto], known: Iterable[ValueInfoProto]
    ) -> list[ValueInfoProto]:
        """What ONNX's inference tells of tensors between nodes, and of outputs."""
        bare = ModelProto()
        bare.ir_version = max(4, self.model.ir_version)  # initialisers are no inputs
        bare.opset_import.extend(self.model.opset_import)
        graph = bare.graph
        graph.name = self.model.graph.name
        graph.node.extend(self.model.graph.node)
        for name, tensor in self.initialisers.items():
            if self.is_apart(name):
                info = helper.make_tensor_value_info(name, tensor.data_type, tensor.dims)
                graph.input.append(info)
            else:
                graph.initializer.append(tensor)
        graph.input.extend(inputs)
        graph.value_info.extend(known)
        with contextlib.suppress(Exception):  # it raises many; what is known is there
            graph = onnx.shape_inference.infer_shapes(bare, data_prop=True).graph
        return [each for each in graph.value_info if each.type.tensor_type.elem_type]

    @cached_property
    def graph_bytes(self) -> int:
        """Bytes of the file's graph without the weights that are sent apart from it."""
        apart = (n for n in self.initialisers if self.is_apart(n) and n not in self._places)
        return max(0, int(self.model.ByteSize()) - sum(map(self.weight_bytes, apart)))

    def weight_bytes(self, name: str) -> int:
        """Bytes of an initialiser."""
        place = self._places.get(name)
        return tensor_bytes(self.initialisers[name]) if place is None else place.nbytes

    @property
    def total_weight_bytes(self) -> int:
        return sum(map(self.weight_bytes, self.initialisers))

    def is_apart(self, name: str) -> bool:
        """Whether the bytes of an initialiser are sent apart from the proto of a part."""
        tensor = self.initialisers[name]
        if name in self._places:
            return True
        large = tensor_bytes(tensor) >= OUTSIDE_FROM_BYTES
        return large and (
            tensor.HasField("raw_data") or (tensor.data_type in TYPED and bool(tensor.dims))
        )

    def place(self, name: str) -> WeightPlace | None:
        """Where an initialiser is beside the file; None: it is inside."""
        return self._places.get(name)

    def read_weight(self, name: str) -> NDArray[np.uint8]:
        """The bytes of an initialiser that is apart. Raises CheckpointError if the file beside the
        graph has changed or cannot be read."""
        place = self._places.get(name)
        if place is not None:
            try:
                with place.path.open("rb") as file:
                    file.seek(place.offset)
                    content = file.read(place.nbytes)
            except OSError as error:
                raise CheckpointError(f"{place.path}: {error.strerror}") from error
            if len(content) != place.nbytes:
                raise CheckpointError(f"{place.path} is shorter than it was when it was opened")
            return np.frombuffer(content, np.uint8)
        tensor = self.initialisers[name]
        if tensor.HasField("raw_data"):
            return np.frombuffer(tensor.raw_data, np.uint8)
        array = np.ascontiguousarray(onnx.numpy_helper.to_array(tensor))
        return array.reshape(-1).view(np.uint8)


TYPED = frozenset(
    (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.INT32, TensorProto.INT64)
)  # fmt: skip
"""Types whose values may be stored one by one, and are sent as bytes all the same."""


def tensor_bytes(tensor: TensorProto, path: Path | None = None) -> int:
    """Bytes of an initialiser by its type and shape; of strings, those that are there."""
    if tensor.data_type == TensorProto.STRING:
        return sum(map(len, tensor.string_data))
    count = 1
    for size in tensor.dims:
        if size < 0 or size > MOST_WEIGHTS_BYTES or count > MOST_WEIGHTS_BYTES:
            raise CheckpointError(f"{path}: {named(tensor.name)} has an impossible shape")
        count *= size
    bits = _BITS.get(tensor.data_type)
    if bits is None:
        try:
            bits = 8 * helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
        except KeyError as error:
            raise CheckpointError(f"{path}: {named(tensor.name)} has no known type") from error
    return -(-count * bits // 8)


def _value(info: ValueInfoProto, what: str) -> GraphValue:
    held = info.type.WhichOneof("value")
    dtype = NUMPY_NAMES.get(info.type.tensor_type.elem_type)
    if held != "tensor_type" or dtype is None:
        raise CheckpointError(
            f"the {what} {named(info.name)} is not a tensor of a type that Edge moves",
            remedy="export the model without it; classifiers of skl2onnx with zipmap=False",
        )
    shape: tuple[int | str | None, ...] | None = None
    if info.type.tensor_type.HasField("shape"):
        shape = tuple(map(_size, info.type.tensor_type.shape.dim))
    return GraphValue(name=info.name, dtype=dtype, shape=shape)


def _size(dim: TensorShapeProto.Dimension) -> int | str | None:
    if dim.WhichOneof("value") != "dim_value":
        # Some exporters write "?", "-1" or "None" for every free dimension, which are no names.
        name = dim.dim_param
        is_name = any(map(str.isalpha, name)) and name != "None"
        return name if is_name else None
    # Some exporters write -1 for a free dimension.
    return dim.dim_value if dim.dim_value >= 0 else None


def _without_sizes(value: ValueInfoProto) -> ValueInfoProto:
    free = ValueInfoProto()
    free.CopyFrom(value)
    if free.type.WhichOneof("value") == "tensor_type":
        for dim in free.type.tensor_type.shape.dim:
            dim.ClearField("dim_value")
    return free


def _joined(
    inferred: ValueInfoProto, told: ValueInfoProto | None, names: Collection[str]
) -> ValueInfoProto:
    """Inferred sizes, with the names of free ones as the file tells them, or those of inputs: by
    these ONNX Runtime knows sizes that are equal. Inference makes up others."""
    dims = inferred.type.tensor_type.shape.dim
    others = [] if told is None else told.type.tensor_type.shape.dim
    for at, dim in enumerate(dims):
        if dim.HasField("dim_value"):
            continue
        if len(others) == len(dims) and others[at].dim_param:
            dim.dim_param = others[at].dim_param
        elif dim.dim_param not in names:
            dim.ClearField("dim_param")
    return inferred


def numpy_type(name: str) -> np.dtype[Any]:
    """The type of arrays for a GraphValue.dtype."""
    return (
        np.dtype(object) if name == "string" else np.dtype(getattr(ml_dtypes, name, None) or name)
    )
