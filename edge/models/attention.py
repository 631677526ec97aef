"""Grouped-query attention with rotary positions, with or without a sliding window."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from edge.errors import shown
from edge.kernels.attention.reference import PackedAttention
from edge.kernels.latent_attention.reference import LatentForm
from edge.models.latent_attention import Latent
from edge.models.parts import (
    MatrixSlice,
    PartWeights,
    Rows,
    VectorSlice,
    Weights,
    check_flags,
    check_sizes,
    finite,
    made_of,
    whole_vector,
)
from edge.models.rotary import Rotary, rotary_of
from edge.offload import WindowRows
from edge.partition import kv_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """A unit is a query head; a shard holds the KV heads that its query heads read.

    Where heads are normed together, they are one unit: the norm needs them all.
    """

    kind: ClassVar[str] = "attention"

    num_heads: int
    num_kv_heads: int
    head_size: int
    rotary: Rotary
    window: int | None
    """The sliding window in positions, the query's own included; None: full attention."""
    kept_tokens: int | None = None
    """The most tokens of a request whose keys and values are kept (`WindowRows`); None: all. The
    load decides: see `keeping_windows`."""
    sees_pictures: bool = False
    """The rows of a picture see each other, as far as the window goes back."""
    qkv_bias: bool
    output_bias: bool
    query_key_norm: bool
    """Each head of query and key is normed."""
    value_norm: bool = False
    """Each head of value is normed, by no weights."""
    keys_are_values: bool = False
    """Values are the keys before their norm, without a matrix of their own."""
    joint_norm: bool = False
    """All query heads are normed together, and all key heads."""
    score_scale: float | None = None
    """The scale of scores; None: 1 / sqrt(head_size)."""
    soft_cap: float | None = None
    """Scores s become soft_cap · tanh(s / soft_cap); None: unchanged."""
    output_gate: bool = False
    """Each head's output is multiplied by the sigmoid of a gate, whose rows follow those of its
    query."""
    has_sinks: bool = False
    """Attention sinks: a further score per head without a value, so that weights sum to less than
    1."""
    latent: Latent | None = None
    """Multi-head latent attention: keys and values are made of one latent vector."""
    keys_of: int | None = None
    """The layer whose keys and values are shared; they are recomputed from that layer's input by
    its weights. None: its own."""
    has_norm: bool = True
    """The input is normed."""
    norm_bias: bool = False
    """The input's norm is a LayerNorm: it subtracts the mean and adds a bias."""
    has_post_norm: bool = False
    """The output is normed before it is added to the hidden state."""

    def __post_init__(self) -> None:
        check_sizes(
            num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_size=self.head_size
        )
        check_flags(
            qkv_bias=self.qkv_bias,
            output_bias=self.output_bias,
            query_key_norm=self.query_key_norm,
            value_norm=self.value_norm,
            keys_are_values=self.keys_are_values,
            joint_norm=self.joint_norm,
            output_gate=self.output_gate,
            has_sinks=self.has_sinks,
            sees_pictures=self.sees_pictures,
            has_norm=self.has_norm,
            norm_bias=self.norm_bias,
            has_post_norm=self.has_post_norm,
        )
        for name in ("score_scale", "soft_cap"):
            value = getattr(self, name)
            if value is not None and not finite(value) > 0:
                raise ValueError(f"{name} must be above 0, not {shown(value)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads "
                f"({self.num_kv_heads})"
            )
        object.__setattr__(self, "rotary", rotary_of(self.rotary))
        object.__setattr__(self, "latent", made_of(Latent, self.latent))
        if self.latent is not None:
            self._check_latent(self.latent)
        if self.keys_of is not None:
            self._check_shared()
        if self.joint_norm and self.query_key_norm:
            raise ValueError("heads are normed each or together, not both")
        if self.norm_bias and not self.has_norm:
            raise ValueError("a bias of a norm that is not there")
        if self.joint_norm and self.output_gate:
            raise ValueError("heads that are normed together have no gates")
        if self.head_size % 2 or self.rotary.turned_elements > self.head_size:
            raise ValueError(
                f"a head of {self.head_size} elements, of which {self.rotary.turned_elements} turn"
            )
        if self.window is not None and (type(self.window) is not int or self.window < 1):
            raise ValueError("a sliding window must be at least 1 token")
        if self.kept_tokens is not None:
            if self.window is None or type(self.kept_tokens) is not int:
                raise ValueError("only layers with a window keep a number of tokens")
            WindowRows(window=self.window, kept=self.kept_tokens)

    def _check_latent(self, latent: Latent) -> None:
        if self.num_kv_heads != 1:
            raise ValueError("all heads share the rows of latent attention, as if of one key")
        if self.window is not None or self.soft_cap is not None:
            raise ValueError("attention of a latent vector has no window and no soft cap")
        names = ("qkv_bias", "query_key_norm", "joint_norm", "value_norm", "keys_are_values")
        if any(getattr(self, name) for name in (*names, "output_gate", "has_sinks")):
            raise ValueError("attention of a latent vector has no further parts")
        if latent.shared_size != self.rotary.turned_elements:
            raise ValueError(
                f"keys share {latent.shared_size} elements, of which "
                f"{self.rotary.turned_elements} turn"
            )
        if latent.shared_size >= self.head_size or latent.value_size > self.head_size:
            raise ValueError(
                f"a head of {self.head_size} elements, of which {latent.shared_size} are shared, "
                f"with values of {latent.value_size}"
            )

    def _check_shared(self) -> None:
        if type(self.keys_of) is not int or self.keys_of < 0:
            raise ValueError(f"a layer with keys of layer {shown(self.keys_of)}")
        names = ("qkv_bias", "joint_norm", "output_gate", "norm_bias")
        if self.latent is not None or any(getattr(self, name) for name in names):
            raise ValueError("attention with keys of another layer has no further parts")
        if not self.has_norm:
            raise ValueError("keys of another layer are made of what it normed")

    @property
    def cached_size(self) -> int:
        """Elements of a token's key, and of its value, that are kept for each KV head."""
        return self.head_size if self.latent is None else self.latent.half_row

    @property
    def window_rows(self) -> WindowRows | None:
        """The rows of a layer that keeps the newest tokens only; None: it keeps all."""
        if self.window is None or self.kept_tokens is None:
            return None
        return WindowRows(window=self.window, kept=self.kept_tokens)

    @property
    def value_size(self) -> int:
        """The elements of a head's output."""
        return self.head_size if self.latent is None else self.latent.value_size

    def packed(self, epsilon: float) -> PackedAttention:
        """How it is computed, with this addition to the squares of norms."""
        return PackedAttention(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            turned_elements=self.rotary.turned_elements,
            interleaved=self.rotary.is_interleaved,
            scale=self.score_scale,
            window=self.window,
            soft_cap=self.soft_cap,
            joint_norm=self.joint_norm,
            value_norm=self.value_norm,
            gated=self.output_gate,
            epsilon=epsilon,
        )

    @property
    def latent_form(self) -> LatentForm:
        """How latent attention is computed."""
        assert self.latent is not None
        scale = self.head_size**-0.5 if self.score_scale is None else self.score_scale
        return LatentForm(num_heads=self.num_heads, row_size=self.latent.rows, scale=scale)

    @property
    def num_units(self) -> int:
        """The number of units: query heads, or groups of them."""
        return 1 if self.joint_norm else self.num_heads

    @property
    def num_groups(self) -> int:
        """The number of KV heads, or groups of them."""
        return 1 if self.joint_norm else self.num_kv_heads

    def shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        query, kv = self.num_heads * self.head_size, self.num_kv_heads * self.head_size
        shapes: dict[str, tuple[int, ...]] = {}
        if self.latent is not None:
            shapes = self.latent.shapes(hidden_size, self.num_heads, self.head_size)
            if self.output_bias:
                shapes["output.bias"] = (hidden_size,)
            return shapes | self._norms(hidden_size)
        matrices = [
            ("query", query * self._query_parts, hidden_size, self.qkv_bias),
            ("key", kv, hidden_size, self.qkv_bias),
            (self._value, kv, hidden_size, self.qkv_bias),
            ("output", hidden_size, query, self.output_bias),
        ]
        if self.keys_of is not None:
            del matrices[1:3]
        for role, rows, columns, has_bias in matrices:
            shapes[f"{role}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{role}.bias"] = (rows,)
        if self.has_sinks:
            shapes["sinks"] = (self.num_heads,)
        shapes |= self._norms(hidden_size)
        if self.query_key_norm:
            shapes["query_norm"] = shapes["key_norm"] = (self.head_size,)
            if self.keys_of is not None:
                del shapes["key_norm"]
        if self.joint_norm:
            shapes["query_norm"], shapes["key_norm"] = (query,), (kv,)
        return shapes

    def _norms(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """The shapes of the norms of the hidden state, by name."""
        names = {
            "attention_norm": self.has_norm,
            "attention_norm_bias": self.norm_bias,
            "attention_post_norm": self.has_post_norm,
        }
        return {name: (hidden_size,) for name, is_there in names.items() if is_there}

    def weights(self, hidden_size: int) -> PartWeights:
        if self.latent is not None:
            return self._latent_weights(hidden_size)
        size = self.head_size
        heads, kv_heads = self.num_heads // self.num_units, self.num_kv_heads // self.num_groups
        head, queries = size * hidden_size, heads * self._query_parts
        biases = self.qkv_bias + self.joint_norm
        rows = self.has_norm + self.norm_bias + self.has_post_norm + self.output_bias
        rows += self.keys_of is not None
        fixed = hidden_size * rows + 2 * size * self.query_key_norm
        return PartWeights(
            unit=Weights(
                matrices=(("query.weight", queries * head), ("output.weight", heads * head)),
                vector=queries * size * biases + heads * self.has_sinks,
            ),
            group=Weights(
                matrices=tuple(
                    (f"{role}.weight", kv_heads * head) for role in ("key", self._value)
                ),
                vector=kv_heads * size * (self.qkv_bias + biases),
            ),
            fixed=Weights(vector=fixed),
        )

    def _latent_weights(self, hidden_size: int) -> PartWeights:
        shapes = self.shapes(hidden_size)
        assert self.latent is not None
        of_heads = ("query.weight", "query_up.weight", "key_value.weight", "output.weight")
        sizes = {role: math.prod(shape) for role, shape in shapes.items()}
        keys = (self.head_size - self.latent.shared_size) * self.latent.rank
        sizes["key_value.weight"] -= self.num_heads * keys
        matrices = {role: sizes.pop(role) for role, shape in shapes.items() if len(shape) == 2}
        return PartWeights(
            unit=Weights(
                matrices=tuple(
                    (role, count / self.num_heads)
                    for role, count in matrices.items()
                    if role in of_heads
                ),
                transposed=(("key_value.weight", keys),),
            ),
            fixed=Weights(
                matrices=tuple(each for each in matrices.items() if each[0] not in of_heads),
                vector=sum(sizes.values()),
            ),
        )

    def row_values(self, context_tokens: int, hidden_size: int) -> int:
        """The fused products, their parts turned and transposed, and the scores of every head over
        the whole context; what keys and values are made of, and their parts before they are put
        together."""
        if self.latent is not None:
            made_of = 2 * (self.latent.rows + (self.latent.query_rank or 0))
            heads = self.num_heads * (2 * self.head_size + 8 * self.latent.half_row)
            return made_of + heads
        queries = self.num_heads * (1 + 2 * self.output_gate)
        qkv = (queries + 2 * self.num_kv_heads) * self.head_size
        return 2 * qkv + self.num_heads * context_tokens

    def of_units(self, units: range) -> Attention | None:
        if not units or self.joint_norm:
            return self if units else None
        return dataclasses.replace(
            self, num_heads=len(units), num_kv_heads=len(self._kv_heads(units))
        )

    def matrices(self, layer: str, hidden_size: int, units: range) -> Iterator[MatrixSlice]:
        hidden, units = range(hidden_size), self._heads(units)
        if units:
            if self.latent is not None:
                yield from self.latent.matrices(layer, hidden_size, units, self.head_size)
            elif self.keys_of is not None:
                yield MatrixSlice(
                    name=f"{layer}query",
                    parts=((f"{layer}query.weight", self._elements(units)),),
                    columns=hidden,
                )
                yield MatrixSlice(
                    name=f"{layer}key_value",
                    parts=self._keys_and_values(layer, "weight", units),
                    columns=hidden,
                )
            else:
                yield MatrixSlice(
                    name=f"{layer}qkv", parts=self._fused(layer, "weight", units), columns=hidden
                )
            size = self.value_size
            yield MatrixSlice(
                name=f"{layer}output",
                parts=((f"{layer}output.weight", hidden),),
                columns=range(units.start * size, units.stop * size),
            )

    def vectors(
        self, layer: str, hidden_size: int, units: range, *, is_first: bool
    ) -> Iterator[VectorSlice]:
        if self.has_post_norm:
            yield whole_vector(f"{layer}attention_post_norm", hidden_size)
        units = self._heads(units)
        if not units:
            return
        if self.has_norm:
            yield whole_vector(f"{layer}attention_norm", hidden_size)
        if self.norm_bias:
            yield whole_vector(f"{layer}attention_norm_bias", hidden_size)
        if self.latent is not None:
            yield from self.latent.vectors(layer, units)
        if self.qkv_bias:
            yield VectorSlice(name=f"{layer}qkv.bias", parts=self._fused(layer, "bias", units))
        if self.has_sinks:
            yield VectorSlice(name=f"{layer}sinks", parts=((f"{layer}sinks", units),))
        if self.query_key_norm:
            yield whole_vector(f"{layer}query_norm", self.head_size)
            keys = (f"{self._layer_of_keys(layer)}key_norm", range(self.head_size))
            yield VectorSlice(name=f"{layer}key_norm", parts=(keys,))
        if self.keys_of is not None:
            norm = (f"{self._layer_of_keys(layer)}attention_norm", range(hidden_size))
            yield VectorSlice(name=f"{layer}keys_norm", parts=(norm,))
        if self.joint_norm:
            yield whole_vector(f"{layer}query_norm", self.num_heads * self.head_size)
            yield whole_vector(f"{layer}key_norm", self.num_kv_heads * self.head_size)
        if self.output_bias and is_first:
            yield whole_vector(f"{layer}output.bias", hidden_size)

    def _fused(self, layer: str, suffix: str, units: range) -> Rows:
        """Queries, then gates, then keys, then values."""
        query = f"{layer}query.{suffix}"
        queries, gates = [(query, self._elements(units))], []
        if self.output_gate:
            both = [(query, self._elements(range(n, n + 1))) for n in range(2 * units.stop)]
            queries, gates = both[2 * units.start :: 2], both[2 * units.start + 1 :: 2]
        return (
            *queries,
            *gates,
            *self._keys_and_values(layer, suffix, units),
        )

    def _keys_and_values(self, layer: str, suffix: str, units: range) -> Rows:
        rows = [self._elements(range(head, head + 1)) for head in self._kv_heads(units)]
        layer = self._layer_of_keys(layer)
        return (
            *((f"{layer}key.{suffix}", each) for each in rows),
            *((f"{layer}{self._value}.{suffix}", each) for each in rows),
        )

    def _layer_of_keys(self, layer: str) -> str:
        return layer if self.keys_of is None else f"layers.{self.keys_of}."

    @property
    def _value(self) -> str:
        """The role of the values' matrix. If keys use it, too, a shard has its rows twice, which
        keeps the layout uniform."""
        return "key" if self.keys_are_values else "value"

    @property
    def _query_parts(self) -> int:
        """Rows of the query's matrix per element of a query."""
        return 2 if self.output_gate else 1

    def _heads(self, units: range) -> range:
        """The query heads of these units."""
        return range(self.num_heads) if units and self.joint_norm else units

    def _kv_heads(self, units: range) -> tuple[int, ...]:
        return kv_heads(units, self.num_heads, self.num_kv_heads)

    def _elements(self, heads: range) -> range:
        return range(heads.start * self.head_size, heads.stop * self.head_size)
