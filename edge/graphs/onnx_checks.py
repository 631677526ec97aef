"""Opens an ONNX file from outside: it is checked before memory is spent on it."""

from __future__ import annotations

import math
import stat
from collections import Counter
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import GraphProto, ModelProto, TensorProto, helper

from edge.errors import CheckpointError
from edge.graphs.nodes import constants, keep_nodes, named, node_name, put_in_order, subgraphs
from edge.graphs.onnx_file import (
    MOST_WEIGHTS_BYTES,
    OLDEST_OPSET,
    OUTSIDE_FROM_BYTES,
    TYPED,
    OnnxFile,
    WeightPlace,
    tensor_bytes,
)

DOMAINS = frozenset(("", "ai.onnx", "ai.onnx.ml", "com.microsoft"))
"""Domains of operators that ONNX Runtime itself has. Others would need a library of their own."""

MOST_FILE_BYTES = (2 << 30) - 1
"""The largest message of protobuf. Larger models have their weights in files beside it."""
MOST_NODES = 200_000
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
    _lift_constants(path, graph)
    places = _external(path, graph)
    known = _Scope(each.name for each in (*graph.initializer, *graph.input))
    if len({each.name for each in graph.initializer}) != len(graph.initializer):
        raise CheckpointError(f"{path} has two initialisers of one name")
    count = _check_nodes(path, graph, known, depth=0)
    if not count:
        raise CheckpointError(f"{path} has no nodes")
    for output in graph.output:
        if output.name not in known:
            raise CheckpointError(f"{path}: no node computes the output {named(output.name)}")
    file = OnnxFile(path, model, places)
    names = [each.name for each in file.outputs]
    if not names or len(set(names)) != len(names):
        raise CheckpointError(f"{path} must have outputs, each with a name of its own")
    if constant := next((n for n in names if n in file.initialisers), None):
        raise CheckpointError(f"{path}: the output {named(constant)} is a constant of the file")
    return file


def _lift_constants(path: Path, graph: GraphProto) -> None:
    """Make initialisers of the large constants of nodes, which some converters write for weights:
    so a device gets and counts only those of its part."""
    given = {each.name for each in graph.output}
    weights: dict[int, TensorProto] = {}
    for at, node in enumerate(graph.node):
        if node.op_type != "Constant" or node.domain not in ("", "ai.onnx"):
            continue
        tensors, names = list(constants(node)), [name for name in node.output if name not in given]
        if not len(tensors) == len(names) == len(node.attribute) == 1 or not names[0]:
            continue
        is_inside = tensors[0].data_location != TensorProto.EXTERNAL
        if is_inside and tensor_bytes(tensors[0], path) >= OUTSIDE_FROM_BYTES:
            weights[at] = tensors[0]
            weights[at].name = names[0]
    if weights:
        graph.initializer.extend(weights.values())
        keep_nodes(graph, (at for at in range(len(graph.node)) if at not in weights))


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
    put_in_order(graph)
    count = 0
    for node in graph.node:
        count += 1
        if node.domain not in DOMAINS:
            raise CheckpointError(
                f"{path} uses {named(node.op_type)} of the domain {named(node.domain)}, "
                "which ONNX Runtime does not have"
            )
        if missing := next((n for n in node.input if n and n not in known), None):
            raise CheckpointError(
                f"{path}: node {node_name(node)} uses {named(missing)} before it is computed"
            )
        for inner in subgraphs(node):
            _check_texts(path, inner)
            inside = _Scope((each.name for each in (*inner.input, *inner.initializer)), known)
            count += _check_nodes(path, inner, inside, depth=depth + 1)
        bodies = [each for inner in subgraphs(node) for each in inner.initializer]
        for tensor in (*constants(node), *bodies):
            if tensor.data_location == TensorProto.EXTERNAL:
                raise CheckpointError(
                    f"{path}: the constant {named(tensor.name)} of a node lies outside the file, "
                    "which only initialisers may"
                )
        for name in node.output:
            if name and name in known:
                raise CheckpointError(f"{path} computes {named(name)} twice")
            if name:
                known.add(name)
        if count > MOST_NODES:
            raise CheckpointError(f"{path} has more than {MOST_NODES:,} nodes")
    return count


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
                    f"{path}: {named(tensor.name)} has {len(tensor.raw_data):,} bytes, and its "
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
                f"{path}: the place of {named(tensor.name)} is no number"
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
                f"{path}: {named(tensor.name)} needs {needed:,} bytes at {offset:,} of "
                f"{target.name}, which has {sizes[target]:,}"
            )
        places[tensor.name] = WeightPlace(target, offset, length)
    return places


def _check_count(path: Path, tensor: TensorProto) -> None:
    """Raises CheckpointError if values that are stored one by one are not as many as the shape
    says. ONNX Runtime checks those of other types."""
    if tensor.data_type not in TYPED or tensor.HasField("raw_data"):
        return
    values = getattr(tensor, helper.tensor_dtype_to_field(tensor.data_type))
    if len(values) != math.prod(tensor.dims):
        raise CheckpointError(
            f"{path}: {named(tensor.name)} has {len(values):,} values, and its shape "
            f"{math.prod(tensor.dims):,}"
        )


def _beside(path: Path, folder: Path, location: str) -> Path:
    """The file of external data. It must be in the graph's folder, also behind links."""
    said = f"{path} wants weights from {named(location)}, which is not in its own folder"
    parts = PurePosixPath(location.replace("\\", "/"))
    if not location or "\0" in location or parts.is_absolute() or ".." in parts.parts:
        raise CheckpointError(said)
    try:
        target = (folder / parts).resolve()
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, until Python 3.13
        raise CheckpointError(
            f"{path} wants weights from {named(location)}, which is a loop of links"
        ) from error
    if not target.is_relative_to(folder):
        raise CheckpointError(said, remedy="copy the file there in place of a link")
    return target
