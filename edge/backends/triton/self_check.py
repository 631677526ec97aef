"""Compares this GPU's kernels with the reference. See ../self_check.py.

Each operator of the shard's first layer, its embedding and its head are run as in a step, on the
shard's weights in their places. Of wide products a part is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edge.backends.self_check import ROWS, Judge, spread, typical_output
from edge.backends.shard_arrays import ShardArrays
from edge.backends.triton.attention import AttentionBlock
from edge.backends.triton.blocks import Addend, Cast, Norm
from edge.backends.triton.buffers import Lane, StepBuffers
from edge.backends.triton.device import Device
from edge.backends.triton.expert_products import ExpertProducts
from edge.backends.triton.experts import ExpertsBlock
from edge.backends.triton.gated_mlp import GatedMlpBlock
from edge.backends.triton.latent_attention import LatentAttentionBlock
from edge.backends.triton.layers import ShardOperators
from edge.backends.triton.linear_attention import LinearAttentionBlock
from edge.backends.triton.paged_kv_cache import scale_groups
from edge.backends.triton.plain_mlp import PlainMlpBlock
from edge.backends.triton.shared_keys import SharedKeysProduct
from edge.backends.triton.short_convolution import ShortConvolutionBlock
from edge.backends.triton.token_inputs import TokenInputs
from edge.backends.triton.weights import Product
from edge.kernels.activation.reference import activated
from edge.kernels.attention.reference import attention
from edge.kernels.cases import Array, Case, Draw
from edge.kernels.embedding.reference import embedding
from edge.kernels.experts.reference import route
from edge.kernels.experts.triton import mix
from edge.kernels.gated_mlp.reference import gated
from edge.kernels.kv_cache.token_cache import dequantize_heads, quantize_heads
from edge.kernels.layer_norm.reference import add_layer_norm, layer_norm
from edge.kernels.linear_attention.reference import WEIGHTS, linear_attention
from edge.kernels.logits.reference import finish_logits as finished
from edge.kernels.logits.triton import finish_logits
from edge.kernels.matmul.reference import matmul
from edge.kernels.matmul_nbits.triton import MOST_TILED_ROWS
from edge.kernels.rms_norm.reference import add_rms_norm, rms_norm
from edge.kernels.rope.reference import rope
from edge.kernels.sampling.ranking import likeliest
from edge.kernels.sampling.shortlist import SHORTLIST_TOKENS
from edge.kernels.sampling.triton import top_k
from edge.kernels.short_convolution.reference import short_convolution
from edge.kernels.token_inputs.reference import token_inputs
from edge.protocol.step import Step, StepEntry, StepLimits

LARGEST_ERROR = {torch.float32: 1e-3, torch.bfloat16: 2e-2}
"""Largest error of a result over its largest value. Wrong kernels err by far more."""

LARGEST_CACHE_ERROR = {None: 0.0, 8: 2e-2, 4: 0.15}
"""Further error for attention over codes, because a last bit may select the next code."""

_OUTPUTS = 48
"""Number of a product's outputs that are compared; the others must only be finite."""

_PRODUCT_ROWS = (1, 17, 33, MOST_TILED_ROWS + 1)
"""Numbers of rows: of each size of tiles, which so are compiled, and of an unpacked weight."""

_EXPERTS = 3
"""Number of a layer's experts that are compared."""

_REQUEST = "self_check"


def run_self_check(
    operators: ShardOperators,
    arrays: ShardArrays,
    device: Device,
    buffers: StepBuffers,
    limits: StepLimits,
    *,
    bring: Callable[[int], None] = lambda _layer: None,
) -> None:
    """Check all operators. Raises RequestError with an operator whose error is too large.

    bring: puts a layer's matrices into their places.
    """
    check = _Check(operators, arrays, device, buffers, limits)
    if operators.embedding is not None:
        check.embedding()
    for layer in operators.layout.first_of_kind:
        bring(layer)
        for block in operators.blocks[layer]:
            if isinstance(block, AttentionBlock):
                check.attention(block)
            elif isinstance(block, LatentAttentionBlock):
                check.latent_attention(block)
            elif isinstance(block, GatedMlpBlock):
                check.gated(block, layer)
            elif isinstance(block, ExpertsBlock):
                check.experts(block)
            elif isinstance(block, ShortConvolutionBlock):
                check.short_convolution(block)
            elif isinstance(block, LinearAttentionBlock):
                check.linear_attention(block)
            elif isinstance(block, PlainMlpBlock):
                check.plain(block, layer)
        if layer in operators.token_inputs:
            check.token_inputs(operators.token_inputs[layer])
            check.addend(operators.token_addends[layer], layer)
        for addend in operators.addends[layer]:
            check.addend(addend, layer)
    if operators.head is not None:
        check.norm(operators.head.norm, "final_norm")
        check.product(operators.head.product)
        check.finishing()
        check.ranking()


class _Check:
    def __init__(
        self,
        operators: ShardOperators,
        arrays: ShardArrays,
        device: Device,
        buffers: StepBuffers,
        limits: StepLimits,
    ) -> None:
        self._operators = operators
        self._spec = operators.spec
        self._arrays = arrays
        self._device = device
        self._buffers = buffers
        self._limits = limits
        self._judge = Judge(
            backend="triton",
            device_name=device.name,
            remedy="update the GPU's driver, torch and Triton, or start this peer with "
            "--backend ort",
        )
        draw = Draw(0, self.rounded)
        self.normal, self.inputs = draw.normal, draw.rounded

    def tensor(self, array: Array) -> Tensor:
        """The array as a tensor of the products' input type."""
        return torch.from_numpy(array).to(self._device.torch).to(self._operators.activations)

    def wide(self, array: NDArray[Any]) -> Tensor:
        """The array as a tensor of its own type."""
        return torch.from_numpy(array).to(self._device.torch)

    def rounded(self, array: Array) -> Array:
        """The values that `tensor` has."""
        return _array(torch.from_numpy(array).to(self._operators.activations))

    def compare(
        self,
        operator: str,
        given: Tensor,
        expected: Array,
        allowed: float = 0.0,
        typical: float = 0.0,
    ) -> None:
        """allowed: an error larger than usual. typical: see Judge."""
        allowed = max(allowed, LARGEST_ERROR[self._operators.activations])
        self._judge.compare(operator, _array(given), expected, allowed=allowed, typical=typical)

    def check(self, operator: str, face: Callable[..., Tensor], case: Case) -> None:
        """Check a face whose inputs have the type of products' inputs."""
        (expected,) = case.expected()
        self.compare(operator, face(*map(self.tensor, case.inputs)), expected)

    def embedding(self) -> None:
        ids = self._operators.layout.embedding
        inside = sorted({ids.start, ids[len(ids) // 2], ids[-1]})
        outside = [i for i in (ids.start - 1, ids.stop) if 0 <= i < self._spec.vocab_size]
        tokens = (inside + outside)[: min(self._limits.chunk_tokens, self._limits.context_tokens)]
        (lane,) = self._buffers.lanes([_step(0, tokens)])
        self._operators.embed(lane)
        table = self._arrays.read("embedding", [i - ids.start for i in inside])
        known = {token: row for row, token in enumerate(inside)}
        rows = np.asarray([known.get(token, -1) for token in tokens])
        scale = np.float32(self._spec.embedding_scale)
        self.compare("embedding", lane.hidden, scale * embedding(rows, table))

    def norm(self, norm: Norm | Cast, name: str) -> None:
        if isinstance(norm, Cast):
            return
        weight, bias = self._arrays.read(name), self._arrays.vector(f"{name}_bias")
        x, addend = self.normal(2, ROWS[0], len(weight)), self.normal(2, ROWS[0], len(weight))
        hidden = self.wide(x[0].copy())
        epsilon = self._spec.norm_epsilon
        if bias is None:
            operator, alone = "rms_norm", rms_norm(x[0], weight, epsilon=epsilon)
            normed, total = add_rms_norm(x[0], addend[0], weight, epsilon=epsilon)
        else:
            operator, alone = "layer_norm", layer_norm(x[0], weight, bias, epsilon=epsilon)
            normed, total = add_layer_norm(x[0], addend[0], weight, bias, epsilon=epsilon)
        self.compare(f"{operator} ({name})", norm(hidden, None), alone)
        given = norm(hidden, self.wide(addend[0]))
        self.compare(f"add_{operator} ({name})", given, normed)
        self.compare(f"add_{operator} ({name})", hidden, total)

    def addend(self, addend: Addend, layer: int) -> None:
        if addend.weight is None:
            return
        (lane,) = self._buffers.lanes([_step(0, [0])])
        x = self.normal(*lane.partial.shape)
        lane.partial.copy_(torch.from_numpy(x))
        expected = rms_norm(x, _array(addend.weight), epsilon=self._spec.norm_epsilon)
        self.compare(f"rms_norm (after parts of layer {layer})", addend(lane), expected)

    def product(self, product: Product, *, is_wide: bool = False) -> None:
        """Check a product. is_wide: its input is float32."""
        arrays, name = self._arrays, product.name
        outputs, weight = self._some_outputs(product)
        bias = arrays.vector(f"{name}.bias")
        operators = ", ".join(dict.fromkeys(each.kind.operator for each in product.stored))
        for rows in _PRODUCT_ROWS:
            x = (self.normal if is_wide else self.inputs)(rows, weight.shape[1])
            given = product(self.wide(x) if is_wide else self.tensor(x))
            expected = matmul(x, weight, None if bias is None else bias[outputs])
            label = f"{operators} ({name}, {rows} row{'s' if rows > 1 else ''})"
            typical = typical_output(weight)
            self.compare(label, given[:, outputs], expected, typical=typical)
            self.compare(label, torch.isfinite(given).all().float(), np.ones((), np.float32))

    def _some_outputs(self, product: Product) -> tuple[list[int], NDArray[np.float32]]:
        """Some output columns of a product, of each kind of matrix, and their weights."""
        outputs: list[int] = []
        weights: list[NDArray[np.float32]] = []
        for stored in product.stored:
            rows = spread(len(stored.rows), _OUTPUTS)
            outputs += [stored.rows[row] for row in rows]
            weights.append(self._arrays.floats(stored, rows))
        return outputs, np.concatenate(weights)

    def finishing(self) -> None:
        spec, logits = self._spec, self.normal(1, len(self._operators.layout.vocab))
        scale, soft_cap = spec.logit_scale, spec.logit_soft_cap
        x = self.wide(logits.copy())
        expected = finished(logits, scale=scale, soft_cap=soft_cap)
        self.compare("finish_logits", finish_logits(x, scale=scale, soft_cap=soft_cap), expected)

    def ranking(self) -> None:
        """Check the ranking of logits. This also compiles its kernel, which takes seconds on a GPU,
        before the first reply."""
        columns = len(self._operators.layout.vocab)
        most = min(SHORTLIST_TOKENS, columns)
        logits = self.normal(1, columns)
        for count in (1, most) if self._device.is_gpu else (1,):
            scores, ids = top_k(self.wide(logits), count)
            expected = likeliest(logits[0], count)
            label = f"top_k ({count} of {columns} logits)"
            self.compare(label, scores[0], logits[0, expected])
            is_same = torch.from_numpy(expected) == ids[0].cpu()
            self.compare(label, is_same.all().float(), np.ones((), np.float32))

    def gated(self, block: GatedMlpBlock, layer: int) -> None:
        self.norm(block.norm, f"layers.{layer}.mlp_norm")
        self.product(block.gate_up)
        gate_up = self.inputs(ROWS[-1], 2 * block.part.columns)
        case = Case.of(gated, gate_up, activation=block.part.activation)
        self.check(f"gated_mlp ({block.gate_up.name})", block.gate, case)
        self.product(block.down)

    def experts(self, block: ExpertsBlock) -> None:
        """Check the choice of experts, some outputs of a few experts, and their sum."""
        part, p = block.part, f"layers.{block.layer}."
        self.norm(block.norm, f"{p}mlp_norm")
        self.product(block.router, is_wide=True)
        correction = self._arrays.read(f"{p}router_correction") if part.has_correction else None
        for rows in ROWS:
            logits = self.normal(rows, part.num_experts)
            chosen, weights = block.choose(self.wide(logits))
            expected, wanted = route(logits, part.routing, correction)
            label = f"experts ({p}router, {rows} row{'s' if rows > 1 else ''})"
            is_same = chosen.cpu() == torch.from_numpy(expected)
            self.compare(label, is_same.float(), np.ones(expected.shape, np.float32))
            self.compare(label, weights, wanted.astype(np.float32))
            numbers = np.resize(spread(len(part.held), _EXPERTS), (rows, part.top_k))
            for products, per_row in ((block.gate_up, 1), (block.down, part.top_k)):
                self._experts(products, numbers.astype(np.int32), per_row)
            results = self.normal(rows * part.top_k, self._spec.hidden_size)
            mixed = results.reshape(rows, part.top_k, -1) * _array(weights)[..., None]
            self.compare(f"{label}, mixed", mix(self.wide(results), weights), mixed.sum(axis=1))
        gate_up = self.inputs(ROWS[-1], 2 * part.columns)
        case = Case.of(gated, gate_up, activation=part.activation, clamp=part.clamp)
        self.check(f"gated_mlp ({block.gate_up.names[0]})", block.gate, case)
        for product in block.shared or ():
            self.product(product)

    def _experts(self, products: ExpertProducts, chosen: NDArray[np.int32], per_row: int) -> None:
        """per_row: rows of x for each row of `chosen`."""
        numbers = [int(number) for number in np.unique(chosen)]
        outputs: list[int] = []
        weights: dict[int, list[Array]] = {number: [] for number in numbers}
        for run in products.runs:
            rows = spread(len(run[0].rows), _OUTPUTS)
            outputs += [run[0].rows[row] for row in rows]
            for number in numbers:
                weights[number].append(self._arrays.floats(run[number], rows))
        biases = None if products.biases is None else _array(products.biases)
        x = self.inputs(len(chosen) * per_row, len(products.runs[0][0].part.columns))
        given, sent = self.tensor(x), self.wide(chosen)
        found = products(given, sent, products.sort(sent, element_bytes=given.element_size()))
        expected = []
        for use, number in enumerate(chosen.reshape(-1).tolist()):
            row = x[use * len(x) // chosen.size][None]
            bias = None if biases is None else biases[number, outputs]
            expected.append(matmul(row, np.concatenate(weights[number]), bias))
        operators = ", ".join(dict.fromkeys(run[0].kind.operator for run in products.runs))
        count = f"{len(chosen)} row{'s' if len(chosen) > 1 else ''}"
        label = f"{operators} of experts ({products.names[0]} and others, {count})"
        self.compare(label, found[:, outputs], np.concatenate(expected))
        self.compare(label, torch.isfinite(found).all().float(), np.ones((), np.float32))

    def plain(self, block: PlainMlpBlock, layer: int) -> None:
        self.norm(block.norm, f"layers.{layer}.mlp_norm")
        self.product(block.up)
        up = self.inputs(ROWS[-1], block.part.columns)
        case = Case.of(activated, up, activation=block.part.activation)
        self.check(f"activated ({block.up.name})", block.activate, case)
        self.product(block.down)

    def short_convolution(self, block: ShortConvolutionBlock) -> None:
        self.norm(block.norm, f"layers.{block.layer}.attention_norm")
        self.product(block.mixed)
        channels, width = block.weights.shape
        weights = _array(block.weights), None if block.bias is None else _array(block.bias)
        state = np.zeros((width - 1, channels), np.float32)
        for lane in self._steps_of_one_request():
            mixed = self.inputs(lane.num_rows, 3 * channels)
            expected, state = short_convolution(mixed, state, *weights)
            label = f"short_convolution (layer {block.layer}, {lane.num_rows} tokens)"
            self.compare(label, block.convolve(self.tensor(mixed), lane), expected)
        self.product(block.output)

    def linear_attention(self, block: LinearAttentionBlock) -> None:
        part = block.part
        self.norm(block.norm, f"layers.{block.layer}.attention_norm")
        self.product(block.mixed)
        self.product(block.gates)
        weights = [_array(getattr(block, name)) for name in WEIGHTS]
        past = [np.zeros(shape, np.float32) for shape in part.state_shapes]
        values = part.num_value_heads * part.value_size
        for lane in self._steps_of_one_request():
            mixed = self.inputs(lane.num_rows, part.channels + values)
            gates = self.normal(lane.num_rows, 2 * part.num_value_heads)
            expected, *past = linear_attention(
                mixed,
                gates,
                *past,
                *weights,
                key_heads=part.num_key_heads,
                key_size=part.key_size,
                epsilon=block.epsilon,
            )
            label = f"linear_attention (layer {block.layer}, {lane.num_rows} tokens)"
            given = block.attend(self.tensor(mixed), self.wide(gates), lane)
            self.compare(label, given, expected)
        self.product(block.output)

    def _steps_of_one_request(self) -> Iterator[Lane]:
        """The steps of a prompt's chunk and of a token after it."""
        cache, first = self._operators.cache, 0
        try:
            for length in self._lengths():
                step = _step(first, [0] * length)
                cache.place(step)
                (lane,) = self._buffers.lanes([step])
                yield lane
                first += length
                cache.wrote(cache.open(_REQUEST), first)
        finally:
            cache.release(_REQUEST)

    def _lengths(self) -> list[int]:
        limits = self._limits
        most = min(limits.chunk_tokens, limits.context_tokens, limits.cached_tokens)
        lengths = [min(ROWS[-1], most)]
        if lengths[0] < min(limits.context_tokens, limits.cached_tokens):
            lengths.append(1)
        return lengths

    def token_inputs(self, behind: TokenInputs) -> None:
        for each in (behind.projection, behind.gate, behind.output):
            self.product(each)
        shape = ROWS[-1], behind.norm.shape[0]
        made, rows = self.inputs(*shape), self.normal(*shape)
        expected = token_inputs(
            made,
            rows,
            _array(behind.norm),
            hidden_size=behind.hidden_size,
            epsilon=behind.epsilon,
        )
        given = behind.inputs(self.tensor(made), self.wide(rows))
        self.compare(f"token_inputs (layer {behind.layer})", given, expected)

    def attention(self, block: AttentionBlock) -> None:
        self.norm(block.norm, f"layers.{block.layer}.attention_norm")
        if isinstance(block.qkv, SharedKeysProduct):
            self.norm(block.qkv.norm, f"layers.{block.layer}.keys_norm")
            for each in block.qkv.products:
                self.product(each)
        else:
            self.product(block.qkv)
        self._attention(block)
        self.product(block.output)

    def latent_attention(self, block: LatentAttentionBlock) -> None:
        self.norm(block.norm, f"layers.{block.layer}.attention_norm")
        part, latent = block.part, block.latent
        for product in (block.shared, block.query, block.output):
            self.product(product)
        for rows in ROWS:
            heads = np.resize(spread(part.num_heads, _EXPERTS), (rows, part.num_heads))
            for products in (block.keys, block.values):
                self._experts(products, heads.astype(np.int32), part.num_heads)
        lengths, count, form = self._lengths(), part.num_heads, part.latent_form
        tokens = sum(lengths)
        absorbed = self.inputs(tokens, count, latent.rank)
        query = self.inputs(tokens, count, part.head_size)
        made_of, shared = self.inputs(tokens, latent.rank), self.inputs(tokens, latent.shared_size)
        cos, sin = (_array(table[:tokens]) for table in block.tables)

        def joined(still: Array, turning: Array) -> Array:
            """What is stored, or asked for, of [tokens, heads, …]."""
            turned = rope(turning, cos, sin, interleaved=part.rotary.is_interleaved)
            whole = np.concatenate([still, turned], axis=-1)
            half = block.cache.layers[block.layer].head_size
            zeros = 2 * half - whole.shape[-1]
            return self.rounded(np.pad(whole, [(0, 0), (0, 0), (0, zeros)]))

        queries = joined(absorbed, query[..., : latent.shared_size])
        rows_of_all = joined(made_of[:, None], shared[:, None])
        first = 0
        for lane in self._steps_of_one_request():
            end = first + lane.num_rows
            seen = slice(first, end)
            expected = attention(
                queries[seen], rows_of_all[:end], rows_of_all[:end],
                position=first, scale=form.scale,
            )  # fmt: skip
            asked = query.reshape(tokens, -1)
            given = [self.tensor(each[seen]) for each in (absorbed, asked, made_of, shared)]
            # See `_attention`.
            for max_keys in sorted({lane.max_keys, self._limits.context_tokens}):
                longer = replace(lane, max_keys=max_keys)
                mixed = block.attend(given[0], given[1], given[2], given[3], longer)
                label = f"latent attention (layer {block.layer}, {lane.num_rows} of {end} tokens)"
                self.compare(label, mixed, expected)
            first = end

    def _attention(self, block: AttentionBlock) -> None:
        """Check attention over a prompt's chunk, and of a token after it."""
        part, limits, cache = block.part, self._limits, self._operators.cache
        lengths = self._lengths()
        form = part.packed(self._spec.norm_epsilon)
        qkv = self.inputs(sum(lengths), form.columns)
        cos, sin = (_array(table[: len(qkv)]) for table in block.tables)
        norms = None if block.norms is None else (_array(block.norms[0]), _array(block.norms[1]))
        heads = form.heads(qkv, cos, sin, norms)
        bits = cache.layers[block.layer].bits
        heads = replace(
            heads,
            query=self.rounded(heads.query),
            keys=self._kept(heads.keys, bits),
            values=self._kept(heads.values, bits),
        )
        sinks = None if block.sinks is None else _array(block.sinks)
        first = 0
        for lane in self._steps_of_one_request():
            length, end = lane.num_rows, first + lane.num_rows
            expected = form.attend(heads.step(first, end), sinks)
            # The second bound is that of a long context, for which another kernel divides keys.
            for max_keys in sorted({lane.max_keys, limits.context_tokens}):
                given = block.attend(self.tensor(qkv[first:end]), replace(lane, max_keys=max_keys))
                label = f"rope and attention (layer {block.layer}, {length} of {end} tokens)"
                self.compare(label, given, expected, LARGEST_CACHE_ERROR[bits])
            first = end

    def _kept(self, heads: Array, bits: int | None) -> Array:
        """Keys or values [tokens, heads, head_size] as the cache stores them."""
        if bits is None:
            return self.rounded(heads)
        group_size = heads.shape[-1] // scale_groups(heads.shape[-1], bits)
        return dequantize_heads(*quantize_heads(heads, bits=bits, group_size=group_size))


def _step(position: int, tokens: Sequence[int]) -> Step:
    entry = StepEntry(request=_REQUEST, position=position, tokens=tuple(tokens), logit_rows=0)
    return Step(entries=(entry,))


def _array(values: Tensor) -> Array:
    array: Array = values.detach().float().cpu().numpy()
    return array
