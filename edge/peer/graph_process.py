"""Computes one part of a graph for `graph_parts.py`: a separate program under limits of the kernel.

A graph comes from outside. It may loop without end or ask for terabytes, and ONNX Runtime is
written in C++. So each part has a process that starts no others and has a limit of memory; the peer
ends it when it takes too long.

A request is a line with one word, and after it
  load     JSON: the file of the part, where its graph lies in it, whether and how it is measured
  run      tensors (edge/graphs/tensors.py); with them "kept", if some stay (edge/graphs/kept.py)
  profile  nothing: ends the measurement
A reply is a line with a word, and what belongs to it: "failed" has the cause.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.append(sys.argv[4])  # the folder of Edge's package, which may be no usual one

import onnx

from edge.backends.onnx.runtime import new_session_options, ort
from edge.graphs.kept import KeptTensors
from edge.graphs.tensors import pack_parts, unpack
from edge.system.confinement import held_bytes, serve
from edge.system.heap import keep_allocations_together

_LONGEST_CAUSE = 2000
_NO_MEMORY = b"failed\nit takes more memory than is reserved for it"
_PROFILE_BYTES = 512 << 20
_TYPES = {
    "float": "float32", "double": "float64", "float16": "float16", "bool": "bool",
    "string": "string", "int8": "int8", "int16": "int16", "int32": "int32", "int64": "int64",
    "uint8": "uint8", "uint16": "uint16", "uint32": "uint32", "uint64": "uint64",
}  # fmt: skip
"""Types in profiles of ONNX Runtime."""

_NUMBERS = {onnx.TensorProto.DataType.Value(name.upper()): told for name, told in _TYPES.items()}


class PartSession:
    """A part that is loaded."""

    def __init__(self, asked: dict[str, Any], folder: Path | None) -> None:
        path = Path(asked["path"])
        with path.open("rb") as file:
            file.seek(asked["offset"])
            content = file.read(asked["nbytes"])
        _check_weights(content, path.name)
        options = _options()
        options.add_session_config_entry(
            "session.model_external_initializers_file_folder_path", str(path.parent)
        )
        if asked["profile"] and folder is not None:
            options.enable_profiling = True
            options.profile_file_prefix = str(folder / "profile")
        if asked["plain"]:
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        self._session = ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        self._inside = asked["inside"]
        self._plain = content if asked["plain"] else None
        self._outputs = [each.name for each in self._session.get_outputs()]
        self._kept = KeptTensors()

    def run(self, blob: memoryview) -> list[bytes | memoryview]:
        inputs, others = unpack(blob)
        asked = others.get("kept")
        if asked is not None and not self._kept.add_to(inputs, asked):
            return pack_parts({}, forgotten=True)
        results = dict(zip(self._outputs, self._session.run(None, inputs), strict=True))
        if asked is not None:
            results = self._kept.take_from(inputs, results, asked)
        return pack_parts(results)

    def types(self) -> dict[str, str]:
        """The types of tensors between nodes as the graph has them, if it is run as it is written.
        ONNX Runtime computes some of float16 in float32."""
        if self._plain is None:
            return {}
        try:
            graph = onnx.shape_inference.infer_shapes(onnx.ModelProto.FromString(self._plain)).graph
        except Exception:  # it raises many; the types of the run stay
            return {}
        return {
            each.name: _NUMBERS[number]
            for each in (*graph.value_info, *graph.output)
            if (number := each.type.tensor_type.elem_type) in _NUMBERS
        }

    def end_profile(self) -> list[list[Any]]:
        """The name, microseconds and kinds of outputs of each node's runs, in order."""
        path = Path(self._session.end_profiling())
        try:
            events = json.loads(path.read_bytes())
        finally:
            path.unlink()
        return [
            [
                event["name"].removesuffix("_kernel_time"),
                event["dur"],
                [_kind(each) for each in event["args"].get("output_type_shape", ())],
            ]
            for event in events
            if event.get("cat") == "Node"
            and event["name"].endswith("_kernel_time")
            and self._inside not in event["name"]  # of a loop's body, which is many
        ]


def _kind(told: dict[str, list[int]]) -> list[Any]:
    ((name, shape),) = told.items()
    return [_TYPES.get(name, name), shape]


def _options() -> Any:
    options = new_session_options()
    # Packed weights are no part of the arena, which grows to powers of two.
    options.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
    return options


def _check_weights(content: bytes, file: str) -> None:
    """Raises ValueError if a weight of the graph is anywhere but in the file of the part."""
    model = onnx.ModelProto.FromString(content)
    for tensor in _tensors(model.graph):
        for each in tensor.external_data:
            if each.key == "location" and each.value != file:
                raise ValueError("a weight is not in the file of the part")
    if len(model.functions):
        raise ValueError("the part has functions of its own")


def _tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    for node in graph.node:
        for attribute in node.attribute:
            yield attribute.t
            yield from attribute.tensors
            for sparse in (attribute.sparse_tensor, *attribute.sparse_tensors):
                yield from (sparse.values, sparse.indices)
            for body in (attribute.g, *attribute.graphs):
                yield from _tensors(body)


def _warm_up(threads: int) -> None:
    """Start the threads of ONNX Runtime, which the limits forbid later."""
    ort.set_global_thread_pool_sizes(threads, 1)
    node = onnx.helper.make_node("Identity", ["x"], ["y"])
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph([node], "warm", [value("x", 1, [1])], [value("y", 1, [1])])
    model = onnx.helper.make_model(
        graph, ir_version=8, opset_imports=[onnx.helper.make_opsetid("", 13)]
    )
    ort.InferenceSession(model.SerializeToString(), _options(), providers=["CPUExecutionProvider"])


def main() -> None:
    threads = int(sys.argv[5])
    folder = Path(sys.argv[6]) if sys.argv[6] else None
    keep_allocations_together()
    _warm_up(threads)
    part: PartSession | None = None

    def reply(request: bytes) -> bytes | list[bytes | memoryview]:
        nonlocal part
        view = memoryview(request)
        end = request.index(b"\n", 0, 20)
        word, rest = request[:end].decode(), view[end + 1 :]
        try:
            if word == "load":
                part = None
                part = PartSession(json.loads(bytes(rest)), folder)
                return b"loaded\n"
            if part is None:
                return b"failed\nnothing is loaded"
            if word == "run":
                return [b"ran\n", *part.run(rest)]
            found = {"nodes": part.end_profile(), "types": part.types()}
            return b"profile\n" + json.dumps(found).encode()
        except MemoryError:
            return _NO_MEMORY
        except Exception as error:  # ONNX Runtime raises many
            if "std::bad_alloc" in str(error):
                return _NO_MEMORY
            return b"failed\n" + (str(error) or type(error).__name__)[:_LONGEST_CAUSE].encode(
                "utf-8", "replace"
            )

    serve(reply, beside_bytes=held_bytes(), file_bytes=_PROFILE_BYTES if folder else 0)


if __name__ == "__main__":
    main()
