"""Do ONNX Runtime's kernels compute on this CPU what the reference computes? See ../self_check.py.

The kernels differ with the CPU's instructions. One small graph holds every operator of the shard,
in its sizes but with a few outputs of each matrix: packing those of a whole layer would take longer
than it may.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.backends.ort.products import Matrix, product
from edge.backends.ort.runtime import ort
from edge.backends.self_check import ROWS, Judge, heads_of, spread
from edge.backends.shard_arrays import ShardArrays
from edge.kernels.activation.onnx import activated
from edge.kernels.activation.reference import activated as activated_reference
from edge.kernels.attention.onnx import (
    AttentionNames,
    CacheNames,
    attention,
    rotates_itself,
)
from edge.kernels.experts.onnx import StackedWeights, experts, in_turn, stacked_experts
from edge.kernels.experts.reference import Routing
from edge.kernels.experts.reference import experts as experts_reference
from edge.kernels.gated_mlp.onnx import gated
from edge.kernels.gated_mlp.reference import gated as gated_reference
from edge.kernels.kv_cache.cache_size import cache_row
from edge.kernels.layer_norm.onnx import add_layer_norm
from edge.kernels.layer_norm.reference import add_layer_norm as layer_norm_reference
from edge.kernels.linear_attention.onnx import LinearWeights, linear_attention
from edge.kernels.linear_attention.reference import linear_attention as linear_reference
from edge.kernels.matmul.onnx import matmul
from edge.kernels.matmul.reference import matmul as matmul_reference
from edge.kernels.onnx_graph import OnnxGraph
from edge.kernels.rms_norm.onnx import add_rms_norm
from edge.kernels.rms_norm.reference import add_rms_norm as norm_reference
from edge.kernels.short_convolution.onnx import short_convolution
from edge.kernels.short_convolution.reference import short_convolution as short_reference
from edge.models.attention import Attention
from edge.models.experts import Experts, expert_name, expert_number
from edge.models.gated_mlp import GatedMlp
from edge.models.linear_attention import LinearAttention
from edge.models.plain_mlp import PlainMlp
from edge.models.short_convolution import ShortConvolution
from edge.models.spec import FeedForward, ModelSpec
from edge.protocol.step import SHORTEST_STEP
from edge.weights.block_matrices import Blocks
from edge.weights.recipe import StoredMatrix

LARGEST_ERROR = 1e-3
LARGEST_ERROR_OF_INTEGER_INPUTS = 0.05
"""Accuracy "fast" rounds the inputs of products: 0.005 of a product's norm."""

_OUTPUTS = 16
_EXPERT_SIZE = 16
_LARGE_GATES = 10
"""Larger than what the node clamps gates at for some models, and must not for others."""

_CONTEXT = ROWS[-1] + 1

Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfCheck:
    """What was found: where rows of a step are the same, to the last bit, as in another step."""

    of_chunks: bool
    """In every step of two tokens of a request, or more: but for the last of an odd number."""
    of_pairs: bool
    """In every step of an even number of rows, but for attention, which takes each request by
    itself."""
    of_single: bool
    """Likewise in every step."""


def run_self_check(
    spec: ModelSpec,
    arrays: ShardArrays,
    options: Callable[[], ort.SessionOptions],
    *,
    stacked: Mapping[int, Blocks] = MappingProxyType({}),
) -> SelfCheck:
    """Raises RequestError, with the operator and its error, where one is too far off.

    stacked: of layers whose experts are one node, the kind of their matrices.
    """
    check = _Check(spec, arrays)
    layout = arrays.layout
    matrices, norms = [], []
    for number in layout.first_of_kind:
        prefix, layer = f"layers.{number}.", layout.layer(number)
        names = [each.name for each in layout.matrices if each.name.startswith(prefix)]
        some = {None, *_held(layer.feed_forward)[:1]}  # all are alike
        matrices += [name for name in names if expert_number(name) in some]
        kinds = (
            *("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm"),
            *("query_latent_norm", "kv_latent_norm"),
            *("experts_norm", "router_norm", "shared_post_norm", "experts_post_norm"),
        )
        names = [f"{prefix}{kind}" for kind in kinds]
        norms += [each.name for each in layout.vectors if each.name in names]
        if isinstance(layer.mixer, Attention):
            check.attention(number, layer.mixer)
        elif isinstance(layer.mixer, LinearAttention):
            check.linear_attention(number, layer.mixer)
        elif layer.mixer is not None:
            check.short_convolution(number, layer.mixer)
        if isinstance(layer.feed_forward, PlainMlp):
            check.activated(f"activated.{number}", layer.feed_forward)
        elif layer.feed_forward is not None:
            check.gated(f"gated.{number}", layer.feed_forward)
        if isinstance(layer.feed_forward, Experts):
            check.experts(number, layer.feed_forward)
            if number in stacked:
                check.stacked_experts(number, layer.feed_forward, stacked[number])
            if layer.feed_forward.shared is not None:
                columns = layer.feed_forward.shared.columns
                check.gated(f"gated.{number}.shared", layer.feed_forward.with_columns(columns))
    if layout.is_last_stage and layout.vocab:
        matrices += ["head"]
        norms += ["final_norm"]
    for name in norms:
        check.norm(name)
    for name in matrices:
        for stored in arrays.stored(name):
            check.product(stored)
    return check.run(options)


class _Check:
    """One graph, what it is fed, and what should come out."""

    def __init__(self, spec: ModelSpec, arrays: ShardArrays) -> None:
        self._spec = spec
        self._arrays = arrays
        self._graph = OnnxGraph("self_check")
        self._feeds: list[dict[str, NDArray[Any]]] = [{} for _ in ROWS]
        self._expected: list[dict[str, tuple[str, Array, float]]] = [{} for _ in ROWS]
        """For each run, by output: the operator, its result, and the error that is allowed."""
        self._of_tokens = {"ids", "positions"}
        """Inputs whose second axis is the tokens'."""
        self._attended: set[str] = set()
        """Outputs of attention, which takes each request by itself."""
        self._random = np.random.default_rng(0)

    def run(self, options: Callable[[], ort.SessionOptions]) -> SelfCheck:
        judge = Judge(
            backend="ort",
            device_name="CPU",
            remedy="install another version of onnxruntime on it",
        )
        if not self._expected[0]:
            return SelfCheck(of_chunks=True, of_pairs=True, of_single=True)
        session = ort.InferenceSession(
            self._graph.build(), options(), providers=["CPUExecutionProvider"]
        )
        for feeds, expected in zip(self._feeds, self._expected, strict=True):
            results = session.run(list(expected), feeds)
            for found, (operator, wanted, allowed) in zip(results, expected.values(), strict=True):
                judge.compare(operator, found, wanted, allowed=allowed)
        names = list(self._expected[-1])
        longest = dict(zip(names, results, strict=True))

        def agree(rows: int, *, of: Collection[str]) -> bool:
            some = session.run(list(of), self._first_rows(rows)) if of else ()
            return all(
                np.array_equal(each, longest[name][:, :rows])
                for name, each in zip(of, some, strict=True)
            )

        others = [name for name in names if name not in self._attended]
        return SelfCheck(
            of_chunks=all(agree(rows, of=names) for rows in range(SHORTEST_STEP, ROWS[-1], 2)),
            of_pairs=all(agree(rows, of=others) for rows in range(2, ROWS[-1], 2)),
            of_single=all(agree(rows, of=others) for rows in range(1, ROWS[-1])),
        )

    def _first_rows(self, rows: int) -> dict[str, NDArray[Any]]:
        """The longest step, cut short."""
        few = {
            name: values[:, :rows] if name in self._of_tokens else values
            for name, values in self._feeds[-1].items()
        }
        if "total" in few:
            few["lengths"] = np.asarray([rows - 1], np.int32)
            few["total"] = np.asarray(rows, np.int32)
        return few

    def norm(self, name: str) -> None:
        weight, graph = self._arrays.read(name), self._graph
        if any(each.name == f"{name}_bias" for each in self._arrays.layout.vectors):
            self._layer_norm(name, weight, self._arrays.read(f"{name}_bias"))
            return
        x, addends = self._input(name, len(weight)), self._input(f"{name}+", len(weight))
        outputs = add_rms_norm(
            graph, x, addends, graph.weight(f"{name}.w", weight), epsilon=self._spec.norm_epsilon
        )
        wanted = [
            norm_reference(feeds[x], feeds[addends], weight, epsilon=self._spec.norm_epsilon)
            for feeds in self._feeds
        ]
        for index, value in enumerate(outputs):
            self._output(value, f"rms_norm ({name})", [each[index] for each in wanted])

    def _layer_norm(self, name: str, weight: Array, bias: Array) -> None:
        graph, epsilon = self._graph, self._spec.norm_epsilon
        x, addends = self._input(name, len(weight)), self._input(f"{name}+", len(weight))
        arrays = graph.weight(f"{name}.w", weight), graph.weight(f"{name}.b", bias)
        outputs = add_layer_norm(graph, x, addends, *arrays, epsilon=epsilon)
        wanted = [
            layer_norm_reference(feeds[x], feeds[addends], weight, bias, epsilon=epsilon)
            for feeds in self._feeds
        ]
        for index, value in enumerate(outputs):
            self._output(value, f"layer_norm ({name})", [each[index] for each in wanted])

    def product(self, stored: StoredMatrix) -> None:
        arrays, graph, name = self._arrays, self._graph, stored.name
        padding = stored.padding
        outputs = spread(len(stored.rows), _OUTPUTS)
        weight = arrays.floats(stored, outputs)
        x = self._input(name, weight.shape[1], padding=padding)
        matrix = Matrix(
            kind=stored.kind,
            accuracy=arrays.format.accuracy,
            rows=len(outputs),
            columns=stored.columns,
            array=lambda suffix: graph.weight(
                f"{name}.{suffix}", arrays.array(stored, suffix, outputs)
            ),
        )
        value = product(graph, x, matrix)
        rounds = arrays.format.rounds(stored.kind)
        wanted = [matmul_reference(feeds[x][..., padding:], weight) for feeds in self._feeds]
        self._output(
            value,
            f"{stored.kind.operator} ({name})",
            wanted,
            LARGEST_ERROR_OF_INTEGER_INPUTS if rounds else LARGEST_ERROR,
        )

    def gated(self, name: str, part: GatedMlp | Experts) -> None:
        x, activation = self._input(name, 2 * part.columns), part.activation
        clamp = part.clamp if isinstance(part, Experts) else None
        wanted = [
            gated_reference(feeds[x], activation=activation, clamp=clamp) for feeds in self._feeds
        ]
        value = gated(self._graph, x, activation=activation, clamp=clamp)
        self._output(value, "gated_mlp", wanted)

    def activated(self, name: str, part: PlainMlp) -> None:
        x, activation = self._input(name, part.columns), part.activation
        wanted = [activated_reference(feeds[x], activation=activation) for feeds in self._feeds]
        value = activated(self._graph, x, activation=activation)
        self._output(value, "activation", wanted)

    def experts(self, layer: int, part: Experts) -> None:
        """As many as the layer has, with a few weights in each."""
        graph, size = self._graph, _EXPERT_SIZE
        shape = (part.num_experts, size, size)
        weights = self._random.standard_normal(shape, dtype=np.float32) * size**-0.5
        name = f"layers.{layer}.router_correction"
        own = self._arrays.read(name) if part.has_correction else None
        scales = self._arrays.read(f"layers.{layer}.expert_scales") if part.is_apart else None
        x = self._input(f"experts.{layer}", size)
        logits = self._input(f"router.{layer}", part.num_experts)

        def expert(branch: OnnxGraph, number: int, rows: str) -> str:
            weight = branch.weight(f"expert.{layer}.{number}", weights[number])
            return matmul(branch, rows, weight)

        def given(number: int, rows: Array) -> Array:
            own = matmul_reference(rows, weights[number])
            return own if number in part.held else np.zeros_like(own)

        value = experts(
            graph, x, logits, hidden_size=size, num_experts=part.num_experts, held=part.held,
            routing=part.routing, expert=expert,
            correction=None if own is None else graph.weight(name, own),
            scales=None if scales is None else graph.weight(f"scales.{layer}", scales),
        )  # fmt: skip
        wanted = [
            experts_reference(
                feeds[x][0], feeds[logits][0], part.routing, correction=own,
                scales=scales, expert=given,
            )[None]
            for feeds in self._feeds
        ]  # fmt: skip
        self._output(value, f"experts (layer {layer})", wanted)

    def stacked_experts(self, layer: int, part: Experts, kind: Blocks) -> None:
        """Two of the layer's, with the first of their columns; where others are elsewhere, one that
        is."""
        graph, arrays, hidden = self._graph, self._arrays, self._spec.hidden_size
        columns = 2 * kind.block_size
        own = [expert_name(f"layers.{layer}.", number) for number in part.held[:2]]
        elsewhere = int(part.is_part)
        rows = [*range(columns), *range(part.columns, part.columns + columns)]

        def read(matrix: str, suffix: str) -> list[NDArray[Any]]:
            found = [arrays.read(f"{name}{matrix}.{suffix}") for name in own]
            if matrix == "gate_up":
                return [in_turn(each[rows]) for each in found]
            return [each[:, :2].reshape(len(each), -1) for each in found]

        def weight(matrix: str, suffix: str) -> str:
            name = f"stacked.{layer}.{matrix}.{suffix}"
            return graph.weight(name, np.stack(read(matrix, suffix)))

        def expert(number: int, given: Array) -> Array:
            if number < elsewhere:
                return np.zeros_like(given)
            gate_up, down = (
                arrays.floats(stored, some)
                for matrix, some in (("gate_up", rows), ("down", range(hidden)))
                for stored in arrays.stored(f"{own[number - elsewhere]}{matrix}")
            )
            active = gated_reference(
                matmul_reference(given, gate_up), activation=part.activation, clamp=None
            )
            return matmul_reference(active, down[:, :columns])

        x = self._input(f"stacked.{layer}", hidden, gain=_LARGE_GATES)
        count = elsewhere + len(own)
        logits = self._input(f"stacked_router.{layer}", count)
        routing = Routing(top_k=1, renormalized=False)
        stacked = StackedWeights(
            gate_up_codes=weight("gate_up", "codes"), gate_up_scales=weight("gate_up", "scales"),
            down_codes=weight("down", "codes"), down_scales=weight("down", "scales"),
            bits=kind.bits, block_size=kind.block_size,
        )  # fmt: skip
        value = stacked_experts(
            graph, x, logits, hidden_size=hidden, num_experts=count, routing=routing,
            stacked=stacked, held=range(elsewhere, count),
        )  # fmt: skip
        wanted = [
            experts_reference(feeds[x][0], feeds[logits][0], routing, expert=expert)[None]
            for feeds in self._feeds
        ]
        operator = f"stacked experts (layer {layer})"
        self._output(value, operator, wanted, LARGEST_ERROR_OF_INTEGER_INPUTS)

    def attention(self, layer: int, part: Attention) -> None:
        """A token alone, and a chunk."""
        graph, size = self._graph, part.head_size
        gates = part.num_heads * part.output_gate
        heads = part.num_heads + 2 * part.num_kv_heads
        turned = part.rotary.turned_elements
        tables = part.rotary.tables(_CONTEXT)
        dtype, elements = cache_row(size, None)
        shape = [1, part.num_kv_heads, _CONTEXT, elements]
        takes_positions = turned > 0 and not rotates_itself(size, turned)
        cos, sin, keys, values = (f"{name}.{layer}" for name in ("cos", "sin", "keys", "values"))
        if turned:
            cos, sin = (
                graph.input(each, np.float32, [_CONTEXT, turned // 2]) for each in (cos, sin)
            )
        names = AttentionNames(
            cos=cos,
            sin=sin,
            positions=(
                graph.input("positions", np.int64, [1, "tokens"]) if takes_positions else ""
            ),
            lengths=graph.input("lengths", np.int32, [1]),
            total=graph.input("total", np.int32, []),
        )
        prefix = f"layers.{layer}."
        norms = None
        if part.query_key_norm or part.joint_norm:
            norms = self._arrays.read(f"{prefix}query_norm"), self._arrays.read(f"{prefix}key_norm")
        sinks = self._arrays.read(f"{prefix}sinks") if part.has_sinks else None
        x = self._input(f"qkv.{layer}", (heads + gates) * size)
        cache = CacheNames(
            keys=graph.input(keys, dtype, shape), values=graph.input(values, dtype, shape)
        )
        value, *_present = attention(
            graph, x, cache, names, num_heads=part.num_heads, num_kv_heads=part.num_kv_heads,
            head_size=size, turned_elements=turned, interleaved=part.rotary.is_interleaved,
            scale=part.score_scale, window=part.window, soft_cap=part.soft_cap,
            query_norm=None if norms is None else graph.weight(f"{prefix}query_norm", norms[0]),
            key_norm=None if norms is None else graph.weight(f"{prefix}key_norm", norms[1]),
            value_norm=part.value_norm, joint_norm=part.joint_norm, gated=part.output_gate,
            epsilon=self._spec.norm_epsilon,
            sinks=None if sinks is None else graph.weight(f"{prefix}sinks", sinks),
        )  # fmt: skip
        wanted = []
        for rows, feeds in zip(ROWS, self._feeds, strict=True):
            if turned:
                feeds |= {cos: tables[0], sin: tables[1]}
            feeds |= {name: np.zeros(shape, dtype) for name in (keys, values)}
            feeds["lengths"] = np.asarray([rows - 1], np.int32)
            feeds["total"] = np.asarray(rows, np.int32)
            if takes_positions:
                feeds["positions"] = np.arange(rows, dtype=np.int64)[None]
            fused = feeds[x].reshape(rows, heads + gates, size)
            own = range(part.num_heads, part.num_heads + gates)
            apart = heads_of(
                np.delete(fused, own, axis=1), part, tables,
                norms=norms, epsilon=self._spec.norm_epsilon,
            )  # fmt: skip
            attended = apart.attend(0, rows, part, sinks)
            if gates:
                attended = attended / (1 + np.exp(-fused[:, own].reshape(rows, -1)))
            wanted.append(attended[None])
        self._attended.add(self._output(value, f"rope and attention (layer {layer})", wanted))

    def linear_attention(self, layer: int, part: LinearAttention) -> None:
        """From a state that is not empty."""
        graph, prefix = self._graph, f"layers.{layer}."
        values = part.num_value_heads * part.value_size
        mixed = self._input(f"linear.{layer}", part.channels + values)
        gates = self._input(f"linear_gates.{layer}", 2 * part.num_value_heads)
        names = ("linear_convolution", "linear_decay_bias", "linear_decay_rate", "linear_scale")
        arrays = [self._arrays.read(f"{prefix}{name}") for name in names]
        convolution, decay_bias, decay_rate, scale = arrays
        past: list[Array] = []
        inputs = []
        for name, shape in zip(("channels", "state"), part.state_shapes, strict=True):
            past.append(self._random.standard_normal(shape, dtype=np.float32))
            inputs.append(graph.input(f"{name}.{layer}", np.float32, [1, *shape]))
            for feeds in self._feeds:
                feeds[inputs[-1]] = past[-1][None]
        weights = [
            graph.weight(f"{prefix}{name}", array)
            for name, array in zip(names, arrays, strict=True)
        ]
        value, *_present = linear_attention(
            graph, mixed, gates, (inputs[0], inputs[1]), LinearWeights(*weights),
            key_heads=part.num_key_heads, value_heads=part.num_value_heads,
            key_size=part.key_size, value_size=part.value_size, convolution=part.convolution,
            epsilon=self._spec.norm_epsilon,
        )  # fmt: skip
        wanted = []
        for feeds in self._feeds:
            channels, gate = np.split(feeds[mixed][0], [part.channels], axis=-1)
            decay, beta = np.split(feeds[gates][0], 2, axis=-1)
            output, _past = linear_reference(
                channels, gate, decay, beta, past=(past[0], past[1]),
                convolution=convolution.reshape(part.channels, -1), decay_bias=decay_bias,
                decay_rate=decay_rate, scale=scale, key_heads=part.num_key_heads,
                key_size=part.key_size, epsilon=self._spec.norm_epsilon,
            )  # fmt: skip
            wanted.append(output[None])
        self._attended.add(self._output(value, f"linear attention (layer {layer})", wanted))

    def short_convolution(self, layer: int, part: ShortConvolution) -> None:
        """From a state that is not empty."""
        graph, role = self._graph, f"layers.{layer}.short_convolution"
        mixed = self._input(f"short.{layer}", 3 * part.channels)
        (shape,) = part.state_shapes
        past = self._random.standard_normal(shape, dtype=np.float32)
        state = graph.input(f"channels.{layer}", np.float32, [1, *shape])
        convolution = self._arrays.read(role)
        bias = self._arrays.read(f"{role}_bias") if part.bias else None
        value, _present = short_convolution(
            graph, mixed, state, graph.weight(role, convolution),
            channels=part.channels, width=part.convolution,
            bias=None if bias is None else graph.weight(f"{role}_bias", bias),
        )  # fmt: skip
        wanted = []
        for feeds in self._feeds:
            feeds[state] = past[None]
            before, after, x = np.split(feeds[mixed][0], 3, axis=-1)
            output, _past = short_reference(
                before, after, x, past=past, bias=bias,
                convolution=convolution.reshape(part.channels, -1),
            )  # fmt: skip
            wanted.append(output[None])
        self._attended.add(self._output(value, f"short convolution (layer {layer})", wanted))

    def _input(self, name: str, width: int, *, padding: int = 0, gain: int = 1) -> str:
        """Normal numbers, times `gain`, [1, rows, padding + width], the padding zeros."""
        name = self._graph.input(f"{name}.x", np.float32, [1, "tokens", padding + width])
        self._of_tokens.add(name)
        for rows, feeds in zip(ROWS, self._feeds, strict=True):
            values = gain * self._random.standard_normal((1, rows, width), dtype=np.float32)
            feeds[name] = np.pad(values, ((0, 0), (0, 0), (padding, 0)))
        return name

    def _output(
        self, value: str, operator: str, wanted: list[Array], allowed: float = LARGEST_ERROR
    ) -> str:
        name = f"result_{len(self._expected[0])}"
        self._graph.output(value, name, np.float32, [1, "tokens", wanted[0].shape[-1]])
        for rows, expected, result in zip(ROWS, self._expected, wanted, strict=True):
            label = f"{operator}, {rows} row{'s' if rows > 1 else ''}"
            expected[name] = (label, result, allowed)
        return name


def _held(part: FeedForward | None) -> range:
    """The experts that are here."""
    return part.held if isinstance(part, Experts) else range(0)
