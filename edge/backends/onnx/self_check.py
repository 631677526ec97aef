"""Compares ONNX Runtime's kernels on this CPU with the reference. See ../self_check.py.

The kernels depend on the CPU's instructions. One small graph holds every operator of the shard in
its sizes, but with a few outputs of each matrix, because packing a whole layer takes too long.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.backends.onnx.attention_inputs import attention_face, keys_of, latent_face
from edge.backends.onnx.products import Matrix, as_taken, product
from edge.backends.onnx.runtime import ort
from edge.backends.self_check import ROWS, Judge, spread, typical_output
from edge.backends.shard_arrays import ShardArrays
from edge.kernels.activation.onnx import activated
from edge.kernels.activation.reference import activated as activated_reference
from edge.kernels.cases import Array, Case, Draw
from edge.kernels.experts.onnx import StackedWeights, experts, in_turn, stacked_experts
from edge.kernels.experts.reference import Routing
from edge.kernels.experts.reference import experts as experts_reference
from edge.kernels.gated_mlp.onnx import gated
from edge.kernels.gated_mlp.reference import gated as gated_reference
from edge.kernels.latent_attention.reference import latent_attention as latent_reference
from edge.kernels.layer_norm.onnx import add_layer_norm
from edge.kernels.layer_norm.reference import add_layer_norm as layer_norm_reference
from edge.kernels.linear_attention.onnx import linear_attention
from edge.kernels.linear_attention.reference import WEIGHTS
from edge.kernels.linear_attention.reference import linear_attention as linear_reference
from edge.kernels.matmul.onnx import matmul, matmul_weight
from edge.kernels.matmul.reference import matmul as matmul_reference
from edge.kernels.onnx_cases import CaseGraph
from edge.kernels.onnx_graph import CPU, OnnxGraph, Provider
from edge.kernels.patch_attention.onnx import patch_attention
from edge.kernels.patch_attention.reference import patch_attention as patch_attention_reference
from edge.kernels.rms_norm.onnx import add_rms_norm
from edge.kernels.rms_norm.reference import add_rms_norm as norm_reference
from edge.kernels.short_convolution.onnx import short_convolution
from edge.kernels.short_convolution.reference import short_convolution as short_reference
from edge.models.attention import Attention
from edge.models.experts import Experts, expert_name, expert_number
from edge.models.gated_mlp import GatedMlp
from edge.models.latent_attention import is_of_further_head
from edge.models.linear_attention import LinearAttention
from edge.models.plain_mlp import PlainMlp
from edge.models.short_convolution import ShortConvolution
from edge.models.spec import FeedForward, ModelSpec
from edge.models.towers.tower import Tower
from edge.protocol.step import SHORTEST_STEP
from edge.weights.block_matrices import Blocks
from edge.weights.recipe import StoredMatrix

LARGEST_ERROR = 1e-3
LARGEST_ERROR_OF_INTEGER_INPUTS = 0.05
"""Error allowed for accuracy "fast", whose rounding of inputs errs by 0.005 of a product's norm."""

_OUTPUTS = 16
_EXPERT_SIZE = 16
_LARGE_GATES = 10
"""Larger than the limit at which the node clamps gates for some models only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfCheck:
    """The steps in which a row has the same bits as in other steps."""

    of_chunks: bool
    """In every step of two or more tokens of a request, except the last token of an odd number."""
    of_pairs: bool
    """In every step of an even number of rows, except attention, which takes requests in turn."""
    of_single: bool
    """In every step."""


def run_self_check(
    spec: ModelSpec,
    arrays: ShardArrays,
    session: Callable[[bytes], ort.InferenceSession],
    *,
    stacked: Mapping[int, Blocks] = MappingProxyType({}),
    provider: Provider = CPU,
    device_name: str = "CPU",
    steps: Sequence[int] = ROWS,
) -> SelfCheck:
    """Check all operators. Raises RequestError with an operator whose error is too large.

    session: opens one for a model. steps: rows of the checked steps, the most last; of a single one
    nothing is said about agreement. stacked: layers whose experts are one node, with the kind of
    their matrices.
    """
    backend = "webgpu" if provider.is_webgpu else "ort"
    judge = Judge(
        backend=backend,
        device_name=device_name,
        remedy="install another version of onnxruntime on it",
    )
    check = _Check(spec, arrays, provider, steps)
    layout = arrays.layout
    matrices, norms = [], []
    for number in layout.first_of_kind:
        prefix, layer = f"layers.{number}.", layout.layer(number)
        names = [each.name for each in layout.matrices if each.name.startswith(prefix)]
        some = {None, *_held(layer.feed_forward)[:1]}  # all are alike
        names = [name for name in names if expert_number(name) in some]
        matrices += [name for name in names if not is_of_further_head(name)]
        kinds = (
            *("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm"),
            *("query_latent_norm", "kv_latent_norm"),
            *("experts_norm", "router_norm", "shared_post_norm", "experts_post_norm"),
        )
        names = [f"{prefix}{kind}" for kind in kinds]
        norms += [each.name for each in layout.vectors if each.name in names]
        if isinstance(layer.mixer, Attention) and layer.mixer.latent is not None:
            check.latent_attention(number, layer.mixer)
        elif isinstance(layer.mixer, Attention):
            check.attention(number, layer.mixer)
        elif isinstance(layer.mixer, LinearAttention):
            check.linear_attention(number, layer.mixer)
        elif layer.mixer is not None:
            check.short_convolution(number, layer.mixer)
        if isinstance(layer.feed_forward, PlainMlp):
            check.activated(layer.feed_forward)
        elif layer.feed_forward is not None:
            check.gated(layer.feed_forward)
        if isinstance(layer.feed_forward, Experts):
            check.experts(number, layer.feed_forward)
            if number in stacked:
                check.stacked_experts(number, layer.feed_forward, stacked[number])
            if layer.feed_forward.shared is not None:
                columns = layer.feed_forward.shared.columns
                check.gated(layer.feed_forward.with_columns(columns))
    if spec.joins_states:
        matrices += ["input_projection"]
        norms += ["embedding_norm", "state_norm"]
    if layout.is_last_stage and layout.vocab:
        matrices += ["head"]
        norms += ["final_norm"]
    for name in norms:
        check.norm(name)
    for name in matrices:
        for stored in arrays.stored(name):
            check.product(stored)
    return check.run(session, judge)


def run_tower_check(
    tower: Tower,
    arrays: ShardArrays,
    session: Callable[[bytes], ort.InferenceSession],
    *,
    provider: Provider = CPU,
) -> None:
    """Check the operators of the first layer of a tower or of a part of it, and its products
    outside the layers. Raises RequestError with an operator whose error is too large.

    session: opens one for a model.
    """
    check = _Check(tower.encoder, arrays, provider, ROWS)
    first = arrays.layout.layers.start
    layer = arrays.layout.layer(first)
    assert isinstance(layer.mixer, Attention)
    check.patch_attention(layer.mixer)
    if isinstance(layer.feed_forward, PlainMlp):
        check.activated(layer.feed_forward)
    elif layer.feed_forward is not None:
        check.gated(layer.feed_forward)
    for name in ("attention_norm", "mlp_norm"):
        check.norm(f"layers.{first}.{name}")
    for matrix in arrays.layout.matrices:
        if matrix.name.startswith(f"layers.{first}.") or not matrix.name.startswith("layers."):
            for stored in arrays.stored(matrix.name):
                check.product(stored)
    remedy = "install another version of onnxruntime on it"
    check.run(session, Judge(backend="ort", device_name="CPU", remedy=remedy))


class _Check:
    """One graph of the shard's operators, with a case for each number of rows."""

    def __init__(
        self, spec: ModelSpec, arrays: ShardArrays, provider: Provider, steps: Sequence[int]
    ) -> None:
        self._spec = spec
        self._arrays = arrays
        self._steps = steps
        self._context = steps[-1] + 1
        self._cases = CaseGraph(len(steps), provider)
        self._attended: set[str] = set()
        """Outputs of attention, which takes requests one by one."""
        self._draw = Draw(0)

    def run(self, open_session: Callable[[bytes], ort.InferenceSession], judge: Judge) -> SelfCheck:
        cases = self._cases
        names = list(cases.expected[-1])
        if not names:
            return SelfCheck(of_chunks=True, of_pairs=True, of_single=True)
        session = open_session(cases.graph.build())
        for number, rows in enumerate(self._steps):
            results = session.run(names, cases.feeds[number])
            for found, expected in zip(results, cases.expected[number].values(), strict=True):
                label = f"{expected.operator}, {rows} row{'s' if rows > 1 else ''}"
                judge.compare(
                    label, found, expected.values,
                    allowed=expected.allowed, typical=expected.typical,
                )  # fmt: skip
        longest = dict(zip(names, results, strict=True))

        def agree(rows: int, *, of: Collection[str]) -> bool:
            some = session.run(list(of), self._first_rows(rows)) if of else ()
            return all(
                np.array_equal(each, longest[name][:, :rows])
                for name, each in zip(of, some, strict=True)
            )

        others = [name for name in names if name not in self._attended]
        return SelfCheck(
            of_chunks=all(
                agree(rows, of=names) for rows in range(SHORTEST_STEP, self._steps[-1], 2)
            ),
            of_pairs=all(agree(rows, of=others) for rows in range(2, self._steps[-1], 2)),
            of_single=all(agree(rows, of=others) for rows in range(1, self._steps[-1])),
        )

    def _first_rows(self, rows: int) -> dict[str, NDArray[Any]]:
        """The first rows of the longest step's inputs."""
        few = self._cases.cut(rows)
        if "total" in few:
            few["lengths"], few["total"] = keys_of(rows)
        if "counts" in few:
            few["counts"] = np.asarray([rows], np.int32)
        return few

    def _add(
        self,
        operator: str,
        face: Callable[..., Any],
        formula: Callable[..., Any],
        *widths: int,
        weights: tuple[Array | None, ...] = (),
        states: tuple[Array, ...] = (),
        unbatched: bool = False,
        attends: bool = False,
        allowed: float = LARGEST_ERROR,
        typical: float = 0.0,
        gain: int = 1,
        padding: int = 0,
        **options: Any,
    ) -> None:
        """Add an operator and its formula.

        Inputs are normal numbers times `gain` [1, rows, padding + width] for each of `widths`, with
        zeros as padding; then states. unbatched: see Case. attends: requests are taken one by one;
        the formula is then unbatched, and only the first result is compared.
        """
        before = (0, 0), (0, 0), (padding, 0)
        cases = []
        for rows in self._steps:
            made = [np.pad(self._draw.rounded(1, rows, n, gain=gain), before) for n in widths]
            cases.append(
                Case.of(
                    formula, *made, *(state[None] for state in states), weights=weights,
                    unbatched=unbatched or attends, **options,
                )
            )  # fmt: skip
        results = 1 if attends else None
        added = self._cases.add(
            operator, face, *cases, allowed=allowed, typical=typical, results=results
        )
        if attends:
            self._attended.update(added)

    def norm(self, name: str) -> None:
        weight, bias = self._arrays.read(name), self._arrays.vector(f"{name}_bias")
        named, epsilon = f"norm ({name})", self._spec.norm_epsilon
        sizes = len(weight), len(weight)
        if bias is None:
            weights = (weight,)
            self._add(
                f"rms_{named}", add_rms_norm, norm_reference, *sizes, weights=weights,
                epsilon=epsilon,
            )  # fmt: skip
        else:
            self._add(
                f"layer_{named}", add_layer_norm, layer_norm_reference, *sizes,
                weights=(weight, bias), epsilon=epsilon,
            )  # fmt: skip

    def product(self, stored: StoredMatrix) -> None:
        arrays, padding = self._arrays, stored.padding
        outputs = spread(len(stored.rows), _OUTPUTS)
        weight = arrays.floats(stored, outputs)
        found = arrays.some_rows(stored, outputs)

        def face(graph: OnnxGraph, x: str) -> str:
            matrix = Matrix(
                kind=stored.kind,
                accuracy=arrays.format.accuracy,
                rows=len(outputs),
                columns=stored.columns,
                array=lambda suffix: graph.weight(
                    f"{stored.name}.{suffix}", as_taken(suffix, found[suffix], graph.provider)
                ),
            )
            return product(graph, x, matrix)

        rounds = arrays.format.rounds(stored.kind)
        self._add(
            f"{stored.kind.operator} ({stored.name})",
            face,
            lambda x: matmul_reference(x[..., padding:], weight),
            weight.shape[1],
            padding=padding,
            allowed=LARGEST_ERROR_OF_INTEGER_INPUTS if rounds else LARGEST_ERROR,
            typical=typical_output(weight),
        )

    def gated(self, part: GatedMlp | Experts) -> None:
        clamp = part.clamp if isinstance(part, Experts) else None
        self._add(
            "gated_mlp", gated, gated_reference, 2 * part.columns,
            activation=part.activation, clamp=clamp,
        )  # fmt: skip

    def activated(self, part: PlainMlp) -> None:
        activation = part.activation
        self._add("activation", activated, activated_reference, part.columns, activation=activation)

    def experts(self, layer: int, part: Experts) -> None:
        """Add as many experts as the layer has, with a few weights in each."""
        size, count, prefix = _EXPERT_SIZE, part.num_experts, f"layers.{layer}."
        matrices = self._draw.normal(count, size, size) * np.float32(size**-0.5)
        correction = (
            self._arrays.read(f"{prefix}router_correction") if part.has_correction else None
        )
        scales = self._arrays.read(f"{prefix}expert_scales") if part.is_apart else None

        def nodes(branch: OnnxGraph, number: int, rows: str) -> str:
            weight = matmul_weight(matrices[number], branch.provider)
            return matmul(branch, rows, branch.weight(f"expert.{layer}.{number}", weight))

        def formula(number: int, rows: Array) -> Array:
            found = matmul_reference(rows, matrices[number])
            return found if number in part.held else np.zeros_like(found)

        self._add(
            f"experts (layer {layer})",
            partial(experts, hidden_size=size, num_experts=count, held=part.held, expert=nodes),
            partial(experts_reference, expert=formula), size, count,
            weights=(correction, scales), unbatched=True, routing=part.routing,
        )  # fmt: skip

    def stacked_experts(self, layer: int, part: Experts, kind: Blocks) -> None:
        """Add two of the layer's experts with their first columns, and one that is on another shard
        if there are such."""
        graph, arrays, hidden = self._cases.graph, self._arrays, self._spec.hidden_size
        columns = 2 * kind.block_size
        own = [expert_name(f"layers.{layer}.", number) for number in part.held[:2]]
        elsewhere = int(part.is_part)
        rows = [*range(columns), *range(part.columns, part.columns + columns)]
        count = elsewhere + len(own)

        def weight(matrix: str, suffix: str) -> str:
            found = [arrays.read(f"{name}{matrix}.{suffix}") for name in own]
            if matrix == "gate_up":
                found = [in_turn(each[rows]) for each in found]
            else:
                found = [each[:, :2].reshape(len(each), -1) for each in found]
            return graph.weight(f"stacked.{layer}.{matrix}.{suffix}", np.stack(found))

        def formula(number: int, given: Array) -> Array:
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

        stacked = StackedWeights(
            gate_up_codes=weight("gate_up", "codes"), gate_up_scales=weight("gate_up", "scales"),
            down_codes=weight("down", "codes"), down_scales=weight("down", "scales"),
            bits=kind.bits, block_size=kind.block_size,
        )  # fmt: skip
        held = range(elsewhere, count)
        self._add(
            f"stacked experts (layer {layer})",
            partial(
                stacked_experts, hidden_size=hidden, num_experts=count, stacked=stacked, held=held
            ),
            partial(experts_reference, expert=formula), hidden, count,
            allowed=LARGEST_ERROR_OF_INTEGER_INPUTS, gain=_LARGE_GATES, unbatched=True,
            routing=Routing(top_k=1, renormalized=False),
        )  # fmt: skip

    def attention(self, layer: int, part: Attention) -> None:
        """Add attention of a single token and of a chunk."""
        prefix, epsilon = f"layers.{layer}.", self._spec.norm_epsilon
        form, tables = part.packed(epsilon), part.rotary.tables(self._context)
        face = attention_face(
            self._cases, part, epsilon, self._steps, self._context, label=f"{layer}"
        )
        norms: tuple[Array | None, ...] = None, None
        if part.query_key_norm or part.joint_norm:
            norms = tuple(self._arrays.read(f"{prefix}{name}_norm") for name in ("query", "key"))
        sinks = self._arrays.read(f"{prefix}sinks") if part.has_sinks else None

        def formula(
            x: Array, query_norm: Array | None, key_norm: Array | None, sinks: Array | None
        ) -> Array:
            cos, sin = (table[: len(x)] for table in tables)
            norms = None
            if query_norm is not None and key_norm is not None:
                norms = query_norm, key_norm
            return form.attend(form.heads(x, cos, sin, norms), sinks)

        self._add(
            f"rope and attention (layer {layer})", face, formula, form.columns,
            weights=(*norms, sinks), attends=True,
        )  # fmt: skip

    def patch_attention(self, part: Attention) -> None:
        size, heads = part.head_size, part.num_heads
        scale = size**-0.5 if part.score_scale is None else part.score_scale
        self._add(
            "attention of patches", patch_attention, patch_attention_reference,
            *[heads * size] * 3, num_heads=heads, scale=scale,
        )  # fmt: skip

    def latent_attention(self, layer: int, part: Attention) -> None:
        form = part.latent_form
        self._add(
            f"latent attention (layer {layer})",
            latent_face(self._cases, form, self._steps, self._context, label=f"{layer}"),
            partial(latent_reference, form=form),
            form.num_heads * form.filled_size, form.filled_size, attends=True,
        )  # fmt: skip

    def linear_attention(self, layer: int, part: LinearAttention) -> None:
        """Add linear attention from a state that is not empty."""
        values = part.num_value_heads * part.value_size
        self._add(
            f"linear attention (layer {layer})",
            partial(
                linear_attention, value_heads=part.num_value_heads, value_size=part.value_size,
                width=part.convolution,
            ),
            linear_reference, part.channels + values, 2 * part.num_value_heads,
            weights=tuple(self._arrays.read(f"layers.{layer}.linear_{name}") for name in WEIGHTS),
            states=tuple(self._draw.normal(*shape) for shape in part.state_shapes), attends=True,
            key_heads=part.num_key_heads, key_size=part.key_size, epsilon=self._spec.norm_epsilon,
        )  # fmt: skip

    def short_convolution(self, layer: int, part: ShortConvolution) -> None:
        """Add the short convolution from a state that is not empty."""
        role = f"layers.{layer}.short_convolution"
        bias = self._arrays.read(f"{role}_bias") if part.bias else None
        self._add(
            f"short convolution (layer {layer})",
            partial(short_convolution, channels=part.channels, width=part.convolution),
            short_reference, 3 * part.channels,
            weights=(self._arrays.read(role), bias), attends=True,
            states=tuple(self._draw.normal(*shape) for shape in part.state_shapes),
        )  # fmt: skip


def _held(part: FeedForward | None) -> range:
    """The experts of this shard."""
    return part.held if isinstance(part, Experts) else range(0)
