"""A decoder in plain numpy, one whole matrix after the other, and the inputs of each matrix.

No cache, no fusing. It takes a checkpoint's weights by the names in its file, so it shares with the
product only the formulas in `kernels/*/reference.py` and the sizes in `ModelSpec`. Which experts
tokens go through, `transformers` says.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edge.kernels.activation.reference import activated
from edge.kernels.attention.reference import attention
from edge.kernels.embedding.reference import embedding
from edge.kernels.experts.reference import experts
from edge.kernels.gated_mlp.reference import gated
from edge.kernels.layer_norm.reference import layer_norm
from edge.kernels.linear_attention.reference import linear_attention
from edge.kernels.logits.reference import finish_logits
from edge.kernels.matmul.reference import matmul
from edge.kernels.matmul_blocks.reference import rounded_inputs
from edge.kernels.matmul_nbits.reference import dequantize, quantize
from edge.kernels.rms_norm.reference import rms_norm
from edge.kernels.rope.reference import rope
from edge.kernels.short_convolution.reference import short_convolution
from edge.kernels.token_inputs.reference import token_inputs
from edge.models.attention import Attention
from edge.models.experts import Experts
from edge.models.gated_mlp import GatedMlp
from edge.models.linear_attention import LinearAttention
from edge.models.plain_mlp import PlainMlp
from edge.models.short_convolution import ShortConvolution
from edge.models.spec import ModelSpec
from edge.partition import Plan
from edge.weights.file_blocks import FileBlocks
from edge.weights.formats import weight_format
from edge.weights.observation import ObservedRun

if TYPE_CHECKING:
    from tests.support.checkpoints import TinyCheckpoint

Array = NDArray[np.float32]
FLOAT_BITS = 32
_FLOATS = (
    "embed_positions",
    "token_table",
    ".mlp.gate",
    ".mlp.shared_expert_gate",
    ".in_proj_a",
    ".in_proj_b",
)
"""Names of matrices that are not rounded."""


class ReferenceModel:
    """The layers as the model's card draws them.

    With a `dtype` every matrix of the layers and the head is rounded in blocks, and then computed
    with as float32: what quantisation itself changes, exactly. The embedding keeps its values, also
    where the head is the same tensor.
    """

    def __init__(
        self,
        checkpoint: TinyCheckpoint,
        *,
        dtype: str = "float32",
        block_size: int | None = None,
        packed: bool = False,
    ) -> None:
        """packed: int4 as devices without kernels for blocks of files have it."""
        self.spec: ModelSpec = checkpoint.spec
        self.dtype, self.block_size = dtype, block_size
        self.in_blocks = dtype == "int4" and block_size is None and not packed
        weights = checkpoint.llama_weights
        self._table = weights["model.embed_tokens.weight"]
        for name in [each for each in weights if each.endswith("kv_b_proj.weight")]:
            weights = {**weights, **self._of_heads(name, weights[name])}
        self._weights = {
            name: self._rounded(name, weight) if weight.ndim == 2 else weight
            for name, weight in weights.items()
        }

    def held_in(self, name: str) -> tuple[int, int]:
        """Bits and block size of a matrix, as docs/guide/quality.md tells them."""
        given = self.block_size
        if name.removesuffix(".weight").endswith(_FLOATS):
            return FLOAT_BITS, 1
        if ".kv_b_proj.keys." in name and self.dtype != "float32":
            return 8, 32
        if self.dtype in ("int3", "int2"):
            return self._held_in_few_bits(name)
        if self.in_blocks:
            return 4, 32  # of rounded inputs; `_block_type` tells more
        if self.dtype != "int4":
            return {"float32": 32, "int8": 8, "int4-pure": 4}[self.dtype], given or 32
        hidden = self.spec.hidden_size
        usual = given or (64 if hidden % 64 == 0 else 32)
        if any(part in name for part in ("lm_head", "k_proj", "v_proj", "kv_a_proj", "kv_b_proj")):
            return 8, max([usual, *(size for size in (64, 128) if hidden % size == 0)])
        if any(part in name for part in ("q_proj", "q_b_proj", "o_proj", "out_proj")):
            return 4, min(given or 32, 32)
        if "down_proj" not in name:
            return 4, usual
        layers, layer = self.spec.num_layers, int(name.split(".")[2])
        part = self.spec.layer(layer).feed_forward
        fits = part.columns % 64 == 0
        if isinstance(part, Experts) and part.shared is not None:
            fits = fits and part.shared.columns % 64 == 0
        size = given or (64 if fits else 32)
        inner = layer - layers // 8
        if inner < 0 or inner % 3 == 2 or layer >= 7 * layers // 8:
            return 8, max(size, 64) if fits else size
        return 4, size

    def _block_type(self, name: str, columns: int) -> str:
        """The blocks of a matrix, as docs/guide/quality.md tells them."""
        is_down = "down_proj" in name
        wide = columns % 256 == 0 and not (is_down and columns < 1536)
        of_three = (
            "Q4_K Q5_K Q6_K Q5_K"
            if wide and self.spec.hidden_size % 256 == 0
            else "Q5_K Q6_K Q6_K Q6_K" if wide else "Q5_0 Q5_1 Q8_0 Q5_1"
        ).split()  # fmt: skip
        if "lm_head" in name:
            return of_three[1]
        if any(part in name for part in ("k_proj", "v_proj", "kv_a_proj", "kv_b_proj")):
            return of_three[2]
        if is_down:
            layers, layer = self.spec.num_layers, int(name.split(".")[2])
            inner = layer - layers // 8
            if inner < 0 or inner % 3 == 2 or layer >= 7 * layers // 8:
                return of_three[3]
        return of_three[0]

    def _held_in_few_bits(self, name: str) -> tuple[int, int]:
        in_2_bits: tuple[str, ...] = ("gate_proj", "up_proj")
        if self.dtype == "int2":
            in_2_bits = (*in_2_bits, "down_proj", "q_proj")
        bits = 2 if any(part in name for part in in_2_bits) else 4
        fine = ("lm_head", "k_proj", "v_proj", "kv_a_proj", "kv_b_proj", "o_proj", "out_proj")
        if any(part in name for part in fine):
            return bits, min(self.block_size or 32, 32)
        largest, columns = 128, self.spec.hidden_size
        if "down_proj" in name:
            largest, columns = 64, self.spec.layer(0).feed_forward.columns
        fitting = [size for size in (64, 128) if size <= largest and columns % size == 0]
        size = self.block_size or max([32, *fitting])
        return bits, max(size, 32) if bits == 2 else size

    def logits(self, tokens: Sequence[int]) -> Array:
        """[tokens, vocab]: row i is what the model expects after token i."""
        spec = self.spec
        hidden = np.float32(spec.embedding_scale) * embedding(np.asarray(tokens), self._table)
        if spec.learned_positions:
            hidden += self._weights["model.embed_positions.weight"][: len(tokens)]
        embedded, given = hidden.copy(), {}
        for number in range(spec.num_layers):
            layer, prefix = spec.layer(number), f"model.layers.{number}."
            if isinstance(layer.mixer, Attention):
                x = self._norm(hidden, f"{prefix}input_layernorm", layer.mixer.has_norm)
                given[number], of = x, layer.mixer.keys_of
                of = number if of is None else of
                keys = given[of], f"model.layers.{of}.self_attn."
                x = self._attention(x, layer.mixer, f"{prefix}self_attn.", *keys)
            elif isinstance(layer.mixer, ShortConvolution):
                x = self._norm(hidden, f"{prefix}input_layernorm")
                x = self._short_convolution(x, layer.mixer, f"{prefix}conv.")
            else:
                x = self._norm(hidden, f"{prefix}input_layernorm")
                x = self._linear_attention(x, layer.mixer, f"{prefix}linear_attn.")
            hidden += self._norm(x, f"{prefix}post_self_attn_layernorm", layer.mixer.has_post_norm)
            x = self._norm(hidden, f"{prefix}post_attention_layernorm", layer.feed_forward.has_norm)
            if isinstance(layer.feed_forward, Experts) and layer.feed_forward.is_apart:
                x = self._apart(hidden, x, layer.feed_forward, prefix)
            elif isinstance(layer.feed_forward, Experts):
                x = self._experts(x, layer.feed_forward, f"{prefix}mlp.")
            else:
                x = self._mlp(x, number, f"{prefix}mlp.")
            hidden += self._norm(x, f"{prefix}post_mlp_layernorm", layer.feed_forward.has_post_norm)
            if spec.token_inputs:
                hidden += self._of_tokens(hidden, embedded, np.asarray(tokens), number)
            hidden *= self._weights.get(f"{prefix}layer_scalar", np.float32(1))
        logits = self._linear(self._norm(hidden, "model.norm"), "lm_head")
        return finish_logits(logits, scale=spec.logit_scale, soft_cap=spec.logit_soft_cap)

    def _of_tokens(
        self, hidden: Array, embedded: Array, tokens: NDArray[np.int64], layer: int
    ) -> Array:
        """What the layer's own inputs of each token add."""
        spec, prefix = self.spec, f"model.layers.{layer}."
        own = slice(layer * spec.token_inputs, (layer + 1) * spec.token_inputs)
        inputs = token_inputs(
            self._linear(embedded, "token_projection")[:, own],
            self._weights["token_table"][tokens, own],
            self._weights["token_norm"],
            hidden_size=spec.hidden_size,
            epsilon=spec.norm_epsilon,
        )
        part = spec.layer(layer).feed_forward
        assert isinstance(part, GatedMlp)
        gate = activated(self._linear(hidden, f"{prefix}token_gate"), activation=part.activation)
        product = self._linear(gate * inputs, f"{prefix}token_output")
        return self._norm(product, f"{prefix}token_post_norm")

    def _latent_attention(self, x: Array, part: Attention, prefix: str) -> Array:
        """A query is multiplied with its head's keys, and what it mixes with its head's values."""
        latent, count = part.latent, part.num_heads
        assert latent is not None
        made_of, shared = np.split(self._linear(x, f"{prefix}kv_a_proj"), [latent.rank], axis=-1)
        weight = self._weights[f"{prefix}kv_a_layernorm.weight"]
        made_of = rms_norm(made_of, weight, epsilon=1e-6)
        if latent.query_rank is None:
            query = self._heads(x, f"{prefix}q_proj", count)
        else:
            weight = self._weights[f"{prefix}q_a_layernorm.weight"]
            given = rms_norm(self._linear(x, f"{prefix}q_a_proj"), weight, epsilon=1e-6)
            query = self._heads(given, f"{prefix}q_b_proj", count)
        own, turned = np.split(query, [part.head_size - latent.shared_size], axis=-1)
        cos, sin = (table[: len(x)] for table in part.rotary.tables(self.spec.context_tokens))
        turned, shared = (
            rope(each, cos, sin, interleaved=part.rotary.is_interleaved)
            for each in (turned, shared[:, None])
        )
        name, heads = f"{prefix}kv_b_proj", range(count)
        of_rows = [self._linear(own[:, head], f"{name}.keys.{head}") for head in heads]
        rows = np.concatenate([made_of[:, None], shared], axis=-1)
        mixed = attention(
            np.concatenate([np.stack(of_rows, axis=1), turned], axis=-1),
            rows, rows, position=0, scale=part.score_scale,
        )[..., : latent.rank]  # fmt: skip
        values = [self._linear(mixed[:, head], f"{name}.values.{head}") for head in heads]
        return self._linear(np.concatenate(values, axis=-1), f"{prefix}o_proj")

    def _of_heads(self, name: str, weight: Array) -> dict[str, Array]:
        """The matrices of each head that make keys, transposed, and values, of latent vectors."""
        part = self.spec.layer(int(name.split(".")[2])).mixer
        assert isinstance(part, Attention)
        assert part.latent is not None
        own = part.head_size - part.latent.shared_size
        module, found = name.removesuffix(".weight"), {}
        for head, rows in enumerate(weight.reshape(part.num_heads, -1, part.latent.rank)):
            found[f"{module}.keys.{head}.weight"] = np.ascontiguousarray(rows[:own].T)
            found[f"{module}.values.{head}.weight"] = rows[own:]
        return found

    def _attention(
        self, x: Array, part: Attention, prefix: str, of_keys: Array, keys: str
    ) -> Array:
        """of_keys: what the layer `keys` was given, of which keys and values are made."""
        if part.latent is not None:
            return self._latent_attention(x, part, prefix)
        query = self._heads(x, f"{prefix}q_proj", part.num_heads)
        query, gates = np.split(query, 2, axis=-1) if part.output_gate else (query, None)
        key = self._heads(of_keys, f"{keys}k_proj", part.num_kv_heads)
        value = key
        if not part.keys_are_values:
            value = self._heads(of_keys, f"{keys}v_proj", part.num_kv_heads)
        if part.value_norm:
            ones = np.ones(part.head_size, np.float32)
            value = rms_norm(value, ones, epsilon=self.spec.norm_epsilon)
        if part.query_key_norm:
            query = self._norm(query, f"{prefix}q_norm")
            key = self._norm(key, f"{keys}k_norm")
        if part.joint_norm:
            query, key = (
                self._norm(x.reshape(len(x), -1), f"{prefix}{name}_norm").reshape(x.shape)
                for x, name in ((query, "q"), (key, "k"))
            )
        return self._attended(x, query, key, value, gates, part, prefix)

    def _attended(
        self,
        x: Array,
        query: Array,
        key: Array,
        value: Array,
        gates: Array | None,
        part: Attention,
        prefix: str,
    ) -> Array:
        rotary = part.rotary
        cos, sin = (table[: len(x)] for table in rotary.tables(self.spec.context_tokens))
        query, key = (
            rope(each, cos, sin, interleaved=rotary.is_interleaved) for each in (query, key)
        )
        mixed = attention(
            query,
            key,
            value,
            position=0,
            scale=part.score_scale,
            window=part.window,
            soft_cap=part.soft_cap,
            sinks=self._weights.get(f"{prefix}sinks"),
        )
        if gates is not None:
            mixed = mixed / (1 + np.exp(-gates))
        return self._linear(mixed.reshape(len(x), -1), f"{prefix}o_proj")

    def _linear_attention(self, x: Array, part: LinearAttention, prefix: str) -> Array:
        mixed, gates = (
            np.concatenate([self._linear(x, f"{prefix}in_proj_{name}") for name in names], axis=-1)
            for names in ("qkvz", "ab")
        )
        channels, states = (np.zeros(shape, np.float32) for shape in part.state_shapes)
        output, *_past = linear_attention(
            mixed,
            gates,
            channels,
            states,
            self._weights[f"{prefix}conv1d.weight"],
            self._weights[f"{prefix}dt_bias"],
            self._weights[f"{prefix}A_log"],
            self._weights[f"{prefix}norm.weight"],
            key_heads=part.num_key_heads,
            key_size=part.key_size,
            epsilon=self.spec.norm_epsilon,
        )
        return self._linear(output, f"{prefix}out_proj")

    def _short_convolution(self, x: Array, part: ShortConvolution, prefix: str) -> Array:
        mixed = [self._linear(x, f"{prefix}{name}_proj") for name in ("before", "after", "value")]
        output, _past = short_convolution(
            np.concatenate(mixed, axis=-1),
            np.zeros(part.state_shapes[0], np.float32),
            self._weights[f"{prefix}conv.weight"],
            self._weights.get(f"{prefix}conv.bias"),
        )
        return self._linear(output, f"{prefix}out_proj")

    def _mlp(self, x: Array, layer: int, prefix: str) -> Array:
        part = self.spec.layer(layer).feed_forward
        if isinstance(part, PlainMlp):
            active = activated(self._linear(x, f"{prefix}up_proj"), activation=part.activation)
            return self._linear(active, f"{prefix}down_proj")
        gate_up = [self._linear(x, f"{prefix}{name}_proj") for name in ("gate", "up")]
        activation = self.spec.layer(layer).feed_forward.activation
        active = gated(np.concatenate(gate_up, axis=-1), activation=activation)
        return self._linear(active, f"{prefix}down_proj")

    def _apart(self, hidden: Array, x: Array, part: Experts, prefix: str) -> Array:
        """A block and experts beside it, each with norms, as Gemma 4 has them."""
        shared = self._shared(x, part, f"{prefix}mlp.")
        x = self._norm(hidden, f"{prefix}experts_norm")
        logits = self._linear(self._norm(hidden, f"{prefix}router_norm"), f"{prefix}mlp.gate")
        logits = logits * np.float32(self.spec.hidden_size**-0.5)
        mixed = self._experts(x, part, f"{prefix}mlp.", logits=logits)
        return self._norm(shared, f"{prefix}shared_post_norm") + self._norm(
            mixed, f"{prefix}experts_post_norm"
        )

    def _experts(
        self, x: Array, part: Experts, prefix: str, *, logits: Array | None = None
    ) -> Array:
        def expert(number: int, rows: Array) -> Array:
            own = f"{prefix}experts.{number}."
            gate_up = [self._linear(rows, f"{own}{name}_proj") for name in ("gate", "up")]
            joined = np.concatenate(gate_up, axis=-1)
            active = gated(joined, activation=part.activation, clamp=part.clamp)
            return self._linear(active, f"{own}down_proj")

        if logits is None:
            logits = self._linear(x, f"{prefix}gate")
        correction = self._weights.get(f"{prefix}gate.e_score_correction_bias")
        mixed = experts(
            x, logits, correction, self._weights.get(f"{prefix}gate.per_expert_scale"),
            routing=part.routing, expert=expert,
        )  # fmt: skip
        return (
            mixed if part.shared is None or part.is_apart else mixed + self._shared(x, part, prefix)
        )

    def _shared(self, x: Array, part: Experts, prefix: str) -> Array:
        own = f"{prefix}shared_expert."
        gate_up = [self._linear(x, f"{own}{name}_proj") for name in ("gate", "up")]
        active = gated(np.concatenate(gate_up, axis=-1), activation=part.activation)
        given = self._linear(active, f"{own}down_proj")
        if part.shared is None or not part.shared.is_gated:
            return given
        output: Array = given / (1 + np.exp(-self._linear(x, f"{prefix}shared_expert_gate")))
        return output

    def _rounded(self, name: str, weight: Array) -> Array:
        bits, block_size = self.held_in(name)
        if bits == 32:
            return weight
        if self.in_blocks and bits == 4:
            rows, columns = weight.shape
            kind = FileBlocks(self._block_type(name, columns))
            whole: Array = kind.floats(kind.rounded(weight).__getitem__, columns)[:rows]
            return whole
        zero_points = self.dtype in ("int4", "int3", "int2") and bits < 8
        return dequantize(
            quantize(weight, bits=bits, block_size=block_size, zero_points=zero_points)
        )

    def _heads(self, x: Array, name: str, num_heads: int) -> Array:
        return self._linear(x, name).reshape(len(x), num_heads, -1)

    def _linear(self, x: Array, name: str) -> Array:
        return matmul(x, self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias"))

    def _norm(self, x: Array, name: str, is_there: bool = True) -> Array:
        if not is_there:
            return x
        bias = self._weights.get(f"{name}.bias")
        if bias is not None:
            weight = self._weights[f"{name}.weight"]
            return layer_norm(x, weight, bias, epsilon=self.spec.norm_epsilon)
        return rms_norm(x, self._weights[f"{name}.weight"], epsilon=self.spec.norm_epsilon)


class IntegerReferenceModel(ReferenceModel):
    """The same with the inputs of every matrix rounded as the integer kernels round them.

    A split matters here: what a shard holds of a block of inputs is rounded by its own peak.
    """

    def __init__(self, exact: ReferenceModel, plan: Plan) -> None:
        """With the rounded weights of `exact`."""
        self.spec, self.dtype, self.block_size = exact.spec, exact.dtype, exact.block_size
        self.in_blocks = exact.in_blocks
        self._table, self._weights = exact._table, exact._weights
        self._cuts: dict[str, tuple[int, ...]] = {}
        kinds = weight_format(self.spec, self.dtype, self.block_size).graded(self.spec).layers
        for stage in plan.stages:
            for layer in stage.layers:
                slices = [shard.slice(kinds[layer]) for shard in stage.slices]
                columns = tuple(each.ffn_columns.stop for each in slices)
                mixer = self.spec.layer(layer).mixer
                name, size = "linear_attn.out_proj", 0
                if isinstance(mixer, Attention):
                    name = "self_attn.o_proj"
                    size = mixer.value_size * (mixer.num_heads // mixer.num_units)
                elif isinstance(mixer, ShortConvolution):
                    name, size = "conv.out_proj", mixer.unit_channels
                else:
                    size = mixer.value_size * mixer.value_heads
                heads = tuple(each.heads.stop * size for each in slices)
                self._cuts[f"model.layers.{layer}.{name}"] = heads
                self._cuts[f"model.layers.{layer}.mlp.down_proj"] = columns
                part = self.spec.layer(layer).feed_forward
                if isinstance(part, Experts) and part.shared is not None:
                    share = part.shared.columns / part.columns
                    self._cuts[f"model.layers.{layer}.mlp.shared_expert.down_proj"] = tuple(
                        int(each * share) for each in columns
                    )

    def _linear(self, x: Array, name: str) -> Array:
        if self.held_in(name)[0] == FLOAT_BITS:
            return super()._linear(x, name)
        of_layer = re.sub(r"experts\.\d+\.", "", name)
        cuts = sorted({0, *self._cuts.get(of_layer, ()), x.shape[-1]})
        pieces = [
            self._rounded_inputs(x[..., start:stop], name, start)
            for start, stop in itertools.pairwise(cuts)
        ]
        return super()._linear(np.concatenate(pieces, axis=-1), name)

    def _rounded_inputs(self, x: Array, name: str, first_column: int) -> Array:
        bits, size = self.held_in(name)
        if not self.in_blocks or bits == 8:
            return rounded_activations(x, size, first_column=first_column)
        left = first_column % 32
        padded = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(left, 0)])
        return rounded_inputs(padded)[..., left:]


def rounded_activations(x: Array, block_size: int, *, first_column: int = 0) -> Array:
    """x [..., columns] as `MatMulNBits` of accuracy level 4 sees it: int8 in blocks, absmax at 127.

    `first_column` is where x begins in the whole matrix, whose blocks stay where they are. The
    kernel multiplies by the float32 reciprocal of the scale and rounds half to even.
    """
    left, columns = first_column % block_size, x.shape[-1]
    widths = [(0, 0)] * (x.ndim - 1) + [(left, -(left + columns) % block_size)]
    blocks = np.pad(x, widths).reshape(*x.shape[:-1], -1, block_size)
    scales = np.abs(blocks).max(axis=-1, keepdims=True) / np.float32(127)
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales != 0)
    rounded: Array = np.rint(blocks * inverse) * scales
    return rounded.reshape(*x.shape[:-1], -1)[..., left : left + columns]


_MODULES = {
    "qkv": "self_attn.q_proj",
    "output": "self_attn.o_proj",
    "gate_up": "mlp.gate_proj",
    "down": "mlp.down_proj",
}
"""Of matrices that are fused, the first: all of them are given the same."""


class ObservedInputs(ReferenceModel):
    """Inputs of every matrix while the model reads prompts, one after the other."""

    def __init__(self, checkpoint: TinyCheckpoint, prompts: Iterable[Sequence[int]]) -> None:
        super().__init__(checkpoint)
        self._inputs: dict[str, list[Array]] = defaultdict(list)
        for prompt in prompts:
            self.logits(prompt)

    def difference(self, run: ObservedRun, gram: Array) -> float:
        """The largest difference of a Gram matrix over the largest value it should have."""
        module = "lm_head"
        if run.matrix != "head":
            _layers, layer, name = run.matrix.split(".")
            module = f"model.layers.{layer}.{_MODULES[name]}"
        columns = slice(run.columns.start, run.columns.stop)
        inputs = np.concatenate(self._inputs[module])[:, columns].astype(np.float64)
        expected = inputs.T @ inputs
        assert gram.shape == expected.shape
        return float(np.abs(gram - expected).max() / np.abs(expected).max())

    def _linear(self, x: Array, name: str) -> Array:
        self._inputs[name].append(x)
        return super()._linear(x, name)


def uses_by_transformers(
    checkpoint: TinyCheckpoint, texts: Iterable[Sequence[int]], layer: int
) -> list[float]:
    """How many of these tokens go through each of a layer's experts."""
    import torch

    block = checkpoint.spec.layer(layer).feed_forward
    assert isinstance(block, Experts)
    uses = np.zeros(block.num_experts)
    before = (checkpoint.spec.layer(each).feed_forward for each in range(layer))
    place = sum(isinstance(each, Experts) for each in before)
    for tokens in texts:
        with torch.no_grad():
            told = checkpoint.model(torch.tensor([list(tokens)]), output_router_logits=True)
        chosen = told.router_logits[place].topk(block.top_k, dim=-1).indices
        uses += np.bincount(chosen.numpy().reshape(-1), minlength=block.num_experts)
    found: list[float] = uses.tolist()
    return found
