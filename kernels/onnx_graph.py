"""Builds one ONNX graph, node by node; every `onnx.py` face of an operator emits into it.

Knows ONNX and nothing of models: values are names, weights are places in one external file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

CONTRIB = "com.microsoft"
"""The domain of ONNX Runtime's own operators."""
EDGE = "edge"
"""The domain of the operator of `kernels/native`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """The execution provider that computes a graph. They lack different operators."""

    name: Literal["cpu", "webgpu"]
    attends_by_nodes: bool = False
    """Whether attention is computed by ordinary nodes, because its operator is wrong there."""
    has_own_attention: bool = False
    """Whether new tokens attend by the operator of kernels/native, where it knows the form."""

    @property
    def is_webgpu(self) -> bool:
        return self.name == "webgpu"


CPU = Provider(name="cpu")
WEBGPU = Provider(name="webgpu")
WEBGPU_BY_NODES = Provider(name="webgpu", attends_by_nodes=True)

_OPSETS = {"": 17, CONTRIB: 1, EDGE: 1}
_IR_VERSION = 9

_ELEMENT_TYPES: dict[np.dtype[Any], int] = {
    np.dtype(np.float32): TensorProto.FLOAT,
    np.dtype(np.float16): TensorProto.FLOAT16,
    np.dtype(ml_dtypes.bfloat16): TensorProto.BFLOAT16,
    np.dtype(np.uint8): TensorProto.UINT8,
    np.dtype(np.int8): TensorProto.INT8,
    np.dtype(np.int32): TensorProto.INT32,
    np.dtype(np.int64): TensorProto.INT64,
    np.dtype(np.bool_): TensorProto.BOOL,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalTensor:
    """A tensor that stays in a file: ONNX Runtime maps it instead of copying it.

    `offset` and `nbytes` are in bytes; `location` is relative to the session's folder.
    """

    location: str
    offset: int
    nbytes: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FedTensor:
    """A tensor that is an input of the graph, so that several graphs share it on a device."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]


Weight = ExternalTensor | FedTensor | NDArray[Any]


class OnnxGraph:
    """Collects nodes in execution order and turns them into a model."""

    def __init__(self, name: str, provider: Provider = CPU) -> None:
        self.name = name
        self.provider = provider
        self._prefix = ""
        """Prefix of names that nodes give: those of a branch must be unlike any around it."""
        self._nodes: list[onnx.NodeProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._initializers: dict[str, TensorProto] = {}
        self._input_names: list[str] = []
        self._shared: dict[str, tuple[str, ...]] = {}

    @property
    def input_names(self) -> tuple[str, ...]:
        return tuple(self._input_names)

    @property
    def num_nodes(self) -> int:
        return len(self._nodes)

    def input(self, name: str, dtype: type | np.dtype[Any], shape: Sequence[int | str]) -> str:
        """Declare an input once; asking again for the same name returns it."""
        if name not in self._input_names:
            kind = _ELEMENT_TYPES[np.dtype(dtype)]
            self._inputs.append(helper.make_tensor_value_info(name, kind, list(shape)))
            self._input_names.append(name)
        return name

    def output(
        self, value: str, name: str, dtype: type | np.dtype[Any], shape: Sequence[int | str]
    ) -> None:
        """Make `value` an output called `name`."""
        if value != name:
            self._nodes.append(helper.make_node("Identity", [value], [name]))
        kind = _ELEMENT_TYPES[np.dtype(dtype)]
        self._outputs.append(helper.make_tensor_value_info(name, kind, list(shape)))

    def constant(self, name: str, array: NDArray[Any]) -> str:
        """A small constant, kept inside the model."""
        if name not in self._initializers:
            tensor = TensorProto(name=name, data_type=_ELEMENT_TYPES[array.dtype])
            tensor.dims.extend(array.shape)
            tensor.raw_data = np.ascontiguousarray(array).tobytes()
            self._initializers[name] = tensor
        return name

    def weight(self, name: str, tensor: Weight) -> str:
        """A weight: external when it lies in a file, an input when it is fed, else inside the
        model."""
        if isinstance(tensor, np.ndarray):
            return self.constant(name, tensor)
        if isinstance(tensor, FedTensor):
            return self.input(name, tensor.dtype, tensor.shape)
        if name not in self._initializers:
            proto = TensorProto(name=name, data_type=_ELEMENT_TYPES[np.dtype(tensor.dtype)])
            proto.dims.extend(tensor.shape)
            proto.data_location = TensorProto.EXTERNAL
            for key, value in (
                ("location", tensor.location),
                ("offset", str(tensor.offset)),
                ("length", str(tensor.nbytes)),
            ):
                proto.external_data.add(key=key, value=value)
            self._initializers[name] = proto
        return name

    def node(self, operator: str, *inputs: str, domain: str = "", **attributes: Any) -> str:
        """Add a node with one output and return the output's name."""
        return self.nodes(operator, *inputs, outputs=1, domain=domain, **attributes)[0]

    def nodes(
        self,
        operator: str,
        *inputs: str,
        outputs: int,
        domain: str = "",
        named: Sequence[str] = (),
        **attributes: Any,
    ) -> tuple[str, ...]:
        """Add a node with several outputs; an input of "" is an optional one left out. named: the
        last outputs, which are the graph's, and are read by further nodes without a copy."""
        index = len(self._nodes)
        own = range(outputs - len(named))
        names = (*(f"{self._prefix}{operator}_{index}_{i}" for i in own), *named)
        given = list(inputs)
        while given and given[-1] == "":
            given.pop()
        self._nodes.append(
            helper.make_node(
                operator,
                given,
                list(names),
                name=f"{self._prefix}{operator}_{index}",
                domain=domain,
                **attributes,
            )
        )
        return names

    def once(self, key: str, make: Callable[[], tuple[str, ...]]) -> tuple[str, ...]:
        """Values that several nodes read: made when they are first asked for."""
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    def branch(self, name: str) -> OnnxGraph:
        """One whose nodes may run or not. It sees the values here, and its weights lie here, where
        they are constants like any other."""
        branch = OnnxGraph(name, self.provider)
        branch._prefix = f"{self._prefix}{len(self._nodes)}.{name}."
        branch._initializers = self._initializers
        branch._inputs, branch._input_names = self._inputs, self._input_names
        return branch

    def body(self, *values: str) -> onnx.GraphProto:
        """This branch as an attribute of a node, which has these as its outputs."""
        results = [onnx.ValueInfoProto(name=value) for value in values]
        return helper.make_graph(self._nodes, self.name, [], results)

    def for_each(self, count: str, make: Callable[[OnnxGraph, str], str]) -> str:
        """The results of `make(branch, number)` for the numbers below `count`, stacked."""
        branch = self.branch("each")
        number, goes_on = f"{branch._prefix}number", f"{branch._prefix}goes_on"
        results = branch.node("Identity", goes_on), make(branch, number)
        body = branch.body(*results)
        for name, kind in ((number, TensorProto.INT64), (goes_on, TensorProto.BOOL)):
            body.input.append(helper.make_tensor_value_info(name, kind, []))
        return self.node("Loop", count, self.node("Equal", count, count), body=body)

    def build(self) -> bytes:
        """The serialized model, without the external weights."""
        graph = helper.make_graph(
            self._nodes, self.name, self._inputs, self._outputs, list(self._initializers.values())
        )
        used = {"", CONTRIB, *(node.domain for node in self._nodes)}
        opsets = [
            helper.make_opsetid(each, number) for each, number in _OPSETS.items() if each in used
        ]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=_IR_VERSION)
        serialized: bytes = model.SerializeToString()
        return serialized
