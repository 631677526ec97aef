"""An ONNX file from outside, checked before memory is spent on it.

Knows the file, its weights and its nodes. Runs nothing. Weights outside the file (external data)
are read when they are asked for.
"""

from __future__ import annotations

import contextlib
import heapq
import math
import stat
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from numpy.typing import NDArray
from onnx import (
    AttributeProto,
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    TensorShapeProto,
    ValueInfoProto,
    helper,
)

from edge.errors import CheckpointError, printable

OLDEST_OPSET = 7
"""The oldest that ONNX Runtime promises to compute."""
DOMAINS = frozenset(("", "ai.onnx", "ai.onnx.ml", "com.microsoft"))
"""Domains of operators that ONNX Runtime itself has. Others would need a library of their own."""

MOST_FILE_BYTES = (2 << 30) - 1
"""The largest message of protobuf. Larger models have their weights in files beside it."""
MOST_NODES = 200_000
MOST_WEIGHTS_BYTES = 1 << 40
_MOST_DEPTH = 32
"""Deepest nesting of control flow."""
_MOST_OUTER_FIELDS = 10_000
_MOST_OTHER_FIELDS = 2 * MOST_NODES
"""Initialisers, inputs and all else that a graph has beside nodes."""

_LAST_FIELD = 25
"""The highest number of a field of ModelProto."""
_GRAPH, _FUNCTIONS = 7, 25
_NODE = 1
"""The number of a field of GraphProto."""
_VARINT, _LENGTH = 0, 2

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
    """A checked graph. Made by `open_onnx`.

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
            tensor.HasField("raw_data") or (tensor.data_type in _TYPED and bool(tensor.dims))
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


_TYPED = frozenset(
    (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.INT32, TensorProto.INT64)
)  # fmt: skip
"""Types whose values may be stored one by one, and are sent as bytes all the same."""


def open_onnx(path: Path) -> OnnxFile:
    """Read and check an ONNX file.

    Raises CheckpointError, with one sentence, for anything that is not a graph that Edge can run:
    another kind of file, a truncated one, external data that is missing or outside its folder,
    operators of custom domains, an opset before 7 or after the newest.
    """
    content = _read(path)
    try:
        model = ModelProto.FromString(content)
    except (DecodeError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: it cannot be read as ONNX") from error
    del content
    _check_versions(path, model)
    graph = model.graph
    _check_texts(path, graph)
    if len(graph.sparse_initializer):
        raise CheckpointError(f"{path} has sparse weights, which are not supported")
    places = _external(path, graph)
    known = _Scope(each.name for each in (*graph.initializer, *graph.input))
    if len({each.name for each in graph.initializer}) != len(graph.initializer):
        raise CheckpointError(f"{path} has two initialisers of one name")
    count = _check_nodes(path, graph, known, depth=0)
    if not count:
        raise CheckpointError(f"{path} has no nodes")
    for output in graph.output:
        if output.name not in known:
            raise CheckpointError(f"{path}: no node computes the output {_named(output.name)}")
    file = OnnxFile(path, model, places)
    names = [each.name for each in file.outputs]
    if not names or len(set(names)) != len(names):
        raise CheckpointError(f"{path} must have outputs, each with a name of its own")
    if constant := next((n for n in names if n in file.initialisers), None):
        raise CheckpointError(f"{path}: the output {_named(constant)} is a constant of the file")
    return file


def _read(path: Path) -> bytes:
    """The bytes of the file, once its outermost fields fit into it."""
    try:
        with path.open("rb") as file:
            info = path.stat()
            if not stat.S_ISREG(info.st_mode):
                raise CheckpointError(f"{path} is not a file")
            if info.st_size > MOST_FILE_BYTES:
                raise CheckpointError(
                    f"{path} has {info.st_size:,} bytes, and an ONNX file has less than 2 GiB",
                    remedy="export it with external data",
                )
            _check_fields(path, file, info.st_size)
            file.seek(0)
            return file.read()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def _check_fields(path: Path, file: BinaryIO, size: int) -> None:
    """Walk over the outermost fields, and those of the graph, without reading them.

    protobuf makes an object of every field, which may take a hundred times the field's bytes.
    """
    position, has_graph = 0, False
    fields, counts = 0, Counter[bool]()
    while position < size:
        file.seek(position)
        head = file.read(32)
        tag, used = _varint(head, 0)
        field, kind = (tag or 0) >> 3, (tag or 0) & 7
        if tag is None or kind not in (_VARINT, _LENGTH) or not 1 <= field <= _LAST_FIELD:
            said = "is damaged" if has_graph else "is not an ONNX file"
            raise CheckpointError(f"{path} {said}: byte {position:,} begins no field of a model")
        number, used = _varint(head, used)
        if number is None:
            raise CheckpointError(f"{path} is truncated: it ends inside a field")
        begin = position + used
        position = begin + (number if kind == _LENGTH else 0)
        has_graph |= field == _GRAPH
        fields += 1
        if fields > _MOST_OUTER_FIELDS:
            raise CheckpointError(f"{path} has more than {_MOST_OUTER_FIELDS:,} outermost fields")
        if field == _FUNCTIONS:
            raise CheckpointError(
                f"{path} has functions of its own",
                remedy="inline them: onnx.inliner.inline_local_functions",
            )
        if field == _GRAPH and kind == _LENGTH and position <= size:
            _count_fields(path, file, begin, position, counts)
    if position > size:
        raise CheckpointError(
            f"{path} is truncated: it has {size:,} bytes, and its fields end at {position:,}"
        )
    if not has_graph:
        raise CheckpointError(f"{path} is not an ONNX file: it has no graph")


def _count_fields(
    path: Path, file: BinaryIO, position: int, end: int, counts: Counter[bool]
) -> None:
    """Walk over the fields of a graph. counts: fields so far, by whether they are nodes."""
    while position < end:
        file.seek(position)
        head = file.read(32)
        tag, used = _varint(head, 0)
        number = None
        if tag is not None and tag & 7 == _LENGTH:
            number, used = _varint(head, used)
        if tag is None or number is None or position + used + number > end:
            raise CheckpointError(
                f"{path} is damaged: byte {position:,} begins no field of a graph"
            )
        position += used + number
        counts[tag >> 3 == _NODE] += 1
        if counts[True] > MOST_NODES:
            raise CheckpointError(f"{path} has more than {MOST_NODES:,} nodes")
        if counts[False] > _MOST_OTHER_FIELDS:
            raise CheckpointError(
                f"{path} has more than {_MOST_OTHER_FIELDS:,} weights and named tensors"
            )


def _varint(content: bytes, start: int) -> tuple[int | None, int]:
    """A number, and where it ends; None: it does not end here."""
    value = 0
    for place in range(start, min(start + 10, len(content))):
        value |= (content[place] & 0x7F) << (7 * (place - start))
        if not content[place] & 0x80:
            return value, place + 1
    return None, start


def _check_versions(path: Path, model: ModelProto) -> None:
    newest = onnx.defs.onnx_opset_version()
    opsets = {each.domain: each.version for each in model.opset_import}
    if not all(isinstance(domain, str) for domain in opsets):
        raise CheckpointError(f"{path} is damaged: it has a name that is not UTF-8")
    version = opsets.get("", opsets.get("ai.onnx"))
    if version is None:
        if not opsets.keys() <= DOMAINS or not opsets:
            raise CheckpointError(f"{path} does not say which operators it uses")
        version = OLDEST_OPSET
    if not OLDEST_OPSET <= version <= newest:
        raise CheckpointError(
            f"{path} uses opset {version}, and Edge runs {OLDEST_OPSET} to {newest}",
            remedy="convert it with onnx.version_converter, or export it again",
        )


def _check_texts(path: Path, graph: GraphProto) -> None:
    """Raises CheckpointError for names that are no UTF-8, which protobuf gives as bytes."""
    if len(graph.node) > MOST_NODES:
        raise CheckpointError(f"{path} has more than {MOST_NODES:,} nodes")
    names: list[object] = []
    for node in graph.node:
        names += (node.op_type, node.domain, node.name, *node.input, *node.output)
    for tensor in graph.initializer:
        names.append(tensor.name)
        names += (text for each in tensor.external_data for text in (each.key, each.value))
    for value in (*graph.input, *graph.output, *graph.value_info):
        names.append(value.name)
        names += (each.dim_param for each in value.type.tensor_type.shape.dim)
    if not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{path} is damaged: it has a name that is not UTF-8")


class _Scope:
    """Names of tensors, and those of the graph around."""

    def __init__(self, names: Iterable[str], around: _Scope | None = None) -> None:
        self._own, self._around = set(names), around

    def __contains__(self, name: str) -> bool:
        return name in self._own or (self._around is not None and name in self._around)

    def add(self, name: str) -> None:
        self._own.add(name)


def _check_nodes(path: Path, graph: GraphProto, known: _Scope, *, depth: int) -> int:
    """Add what the nodes compute to `known`. Returns their number, with those inside of others."""
    if depth > _MOST_DEPTH:
        raise CheckpointError(f"{path} has control flow nested more than {_MOST_DEPTH} deep")
    _put_in_order(graph)
    count = 0
    for node in graph.node:
        count += 1
        if node.domain not in DOMAINS:
            raise CheckpointError(
                f"{path} uses {_named(node.op_type)} of the domain {_named(node.domain)}, "
                "which ONNX Runtime does not have"
            )
        if missing := next((n for n in node.input if n and n not in known), None):
            raise CheckpointError(
                f"{path}: node {_node_name(node)} uses {_named(missing)} before it is computed"
            )
        for inner in subgraphs(node):
            _check_texts(path, inner)
            inside = _Scope((each.name for each in (*inner.input, *inner.initializer)), known)
            count += _check_nodes(path, inner, inside, depth=depth + 1)
        bodies = [each for inner in subgraphs(node) for each in inner.initializer]
        for tensor in (*_constants(node), *bodies):
            if tensor.data_location == TensorProto.EXTERNAL:
                raise CheckpointError(
                    f"{path}: the constant {_named(tensor.name)} of a node lies outside the file, "
                    "which only initialisers may"
                )
        for name in node.output:
            if name and name in known:
                raise CheckpointError(f"{path} computes {_named(name)} twice")
            if name:
                known.add(name)
        if count > MOST_NODES:
            raise CheckpointError(f"{path} has more than {MOST_NODES:,} nodes")
    return count


def _put_in_order(graph: GraphProto) -> None:
    """Put each node behind those whose results it uses, as ONNX demands and some converters forget.

    ONNX Runtime computes such graphs. Nodes keep their order where they can; so do all if there is
    a cycle.
    """
    makers = {name: at for at, node in enumerate(graph.node) for name in node.output if name}
    needed = [{makers[name] for name in inputs_of(node) if name in makers} for node in graph.node]
    if all(max(each, default=-1) < at for at, each in enumerate(needed)):
        return
    users: dict[int, list[int]] = {}
    for at, each in enumerate(needed):
        for maker in each:
            users.setdefault(maker, []).append(at)
    missing = list(map(len, needed))
    ready = [at for at, count in enumerate(missing) if not count]
    order = []
    while ready:
        order.append(heapq.heappop(ready))
        for user in users.get(order[-1], ()):
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, user)
    if len(order) == len(needed):
        nodes = GraphProto()
        nodes.node.extend(graph.node[at] for at in order)
        del graph.node[:]
        graph.node.extend(nodes.node)


def subgraphs(node: NodeProto) -> Iterator[GraphProto]:
    """The graphs that are attributes of a node: bodies of If, Loop and Scan."""
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.g
        elif attribute.type == AttributeProto.GRAPHS:
            yield from attribute.graphs


def _constants(node: NodeProto) -> Iterator[TensorProto]:
    for attribute in node.attribute:
        if attribute.type == AttributeProto.TENSOR:
            yield attribute.t
        elif attribute.type == AttributeProto.TENSORS:
            yield from attribute.tensors


def inputs_of(node: NodeProto) -> list[str]:
    """The tensors that a node reads, with those that its bodies take from outside."""
    found = [name for name in node.input if name]
    for inner in subgraphs(node):
        found += captured(inner)
    return list(dict.fromkeys(found))


def captured(graph: GraphProto) -> list[str]:
    """The tensors that a body takes from around it."""
    own = {each.name for each in (*graph.input, *graph.initializer)}
    found: list[str] = []
    for node in graph.node:
        found += [name for name in inputs_of(node) if name not in own]
        own.update(node.output)
    found += [each.name for each in graph.output if each.name not in own]
    return list(dict.fromkeys(found))


def _external(path: Path, graph: GraphProto) -> dict[str, WeightPlace]:
    """The checked places of initialisers outside the file."""
    folder = path.parent.resolve()
    sizes: dict[Path, int] = {}
    places: dict[str, WeightPlace] = {}
    total = 0
    for tensor in graph.initializer:
        needed = tensor_bytes(tensor, path)
        total += needed
        if total > MOST_WEIGHTS_BYTES:
            raise CheckpointError(f"{path} has more than {MOST_WEIGHTS_BYTES:,} bytes of weights")
        if tensor.data_location != TensorProto.EXTERNAL:
            if tensor.HasField("raw_data") and len(tensor.raw_data) != needed:
                raise CheckpointError(
                    f"{path}: {_named(tensor.name)} has {len(tensor.raw_data):,} bytes, and its "
                    f"shape {needed:,}"
                )
            _check_count(path, tensor)
            continue
        told = {each.key: each.value for each in tensor.external_data}
        target = _beside(path, folder, told.get("location", ""))
        try:
            offset, length = int(told.get("offset") or 0), int(told.get("length") or needed)
        except ValueError as error:
            raise CheckpointError(
                f"{path}: the place of {_named(tensor.name)} is no number"
            ) from error
        if target not in sizes:
            try:
                info = target.stat()
            except OSError as error:
                raise CheckpointError(
                    f"{path} has weights in {target.name}, which is missing",
                    remedy="put it into the same folder",
                ) from error
            if not stat.S_ISREG(info.st_mode):
                raise CheckpointError(f"{target} is not a file")
            sizes[target] = info.st_size
        if length != needed or not 0 <= offset <= sizes[target] - length:
            raise CheckpointError(
                f"{path}: {_named(tensor.name)} needs {needed:,} bytes at {offset:,} of "
                f"{target.name}, which has {sizes[target]:,}"
            )
        places[tensor.name] = WeightPlace(target, offset, length)
    return places


def _check_count(path: Path, tensor: TensorProto) -> None:
    """Raises CheckpointError if values that are stored one by one are not as many as the shape
    says. ONNX Runtime checks those of other types."""
    if tensor.data_type not in _TYPED or tensor.HasField("raw_data"):
        return
    values = getattr(tensor, helper.tensor_dtype_to_field(tensor.data_type))
    if len(values) != math.prod(tensor.dims):
        raise CheckpointError(
            f"{path}: {_named(tensor.name)} has {len(values):,} values, and its shape "
            f"{math.prod(tensor.dims):,}"
        )


def _beside(path: Path, folder: Path, location: str) -> Path:
    """The file of external data. It must be in the graph's folder, also behind links."""
    said = f"{path} wants weights from {_named(location)}, which is not in its own folder"
    parts = PurePosixPath(location.replace("\\", "/"))
    if not location or "\0" in location or parts.is_absolute() or ".." in parts.parts:
        raise CheckpointError(said)
    try:
        target = (folder / parts).resolve()
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, until Python 3.13
        raise CheckpointError(
            f"{path} wants weights from {_named(location)}, which is a loop of links"
        ) from error
    if not target.is_relative_to(folder):
        raise CheckpointError(said, remedy="copy the file there in place of a link")
    return target


def tensor_bytes(tensor: TensorProto, path: Path | None = None) -> int:
    """Bytes of an initialiser by its type and shape; of strings, those that are there."""
    if tensor.data_type == TensorProto.STRING:
        return sum(map(len, tensor.string_data))
    count = 1
    for size in tensor.dims:
        if size < 0 or size > MOST_WEIGHTS_BYTES or count > MOST_WEIGHTS_BYTES:
            raise CheckpointError(f"{path}: {_named(tensor.name)} has an impossible shape")
        count *= size
    bits = _BITS.get(tensor.data_type)
    if bits is None:
        try:
            bits = 8 * helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
        except KeyError as error:
            raise CheckpointError(f"{path}: {_named(tensor.name)} has no known type") from error
    return -(-count * bits // 8)


def _value(info: ValueInfoProto, what: str) -> GraphValue:
    held = info.type.WhichOneof("value")
    dtype = NUMPY_NAMES.get(info.type.tensor_type.elem_type)
    if held != "tensor_type" or dtype is None:
        raise CheckpointError(
            f"the {what} {_named(info.name)} is not a tensor of a type that Edge moves",
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


def _named(text: str) -> str:
    return repr(printable(text, 80))


def _node_name(node: NodeProto) -> str:
    return _named(node.name or node.op_type)


def numpy_type(name: str) -> np.dtype[Any]:
    """The type of arrays for a GraphValue.dtype."""
    return (
        np.dtype(object) if name == "string" else np.dtype(getattr(ml_dtypes, name, None) or name)
    )
