"""A model as data: what its layers compute and how large they are.

Knows no file names, no split and no back end. It crosses the wire as JSON, so a peer needs to know
operators, never families.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

MAX_LAYERS = 4096
MAX_SIZE = 1 << 24
"""No dimension of a model is larger than this; a larger one is a damaged file or a hostile peer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder of pre-norm layers: attention, then a gated feed-forward block."""

    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    ffn_columns: int
    vocab_size: int
    context_tokens: int
    """Positions the model was made for; a prompt and its answer must fit."""
    norm_epsilon: float
    activation: Literal["silu"]
    inverse_frequencies: tuple[float, ...]
    """Rotary angle per position, one for each pair of a head's elements."""
    windows: tuple[int | None, ...]
    """Per layer: how many last positions a query sees, itself included; None for all."""
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    query_key_norm: bool
    tied_embeddings: bool

    def __post_init__(self) -> None:
        sizes = {
            "num_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_size": self.head_size,
            "ffn_columns": self.ffn_columns,
            "vocab_size": self.vocab_size,
            "context_tokens": self.context_tokens,
        }
        for name, value in sizes.items():
            if type(value) is not int or not 0 < value <= MAX_SIZE:
                raise ValueError(f"{name} must be an integer in 1..{MAX_SIZE}, not {value!r}")
        if self.num_layers > MAX_LAYERS:
            raise ValueError(f"num_layers must be at most {MAX_LAYERS}, not {self.num_layers}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads "
                f"({self.num_kv_heads})"
            )
        if self.head_size % 2 or len(self.inverse_frequencies) != self.head_size // 2:
            raise ValueError(f"head_size {self.head_size} needs one frequency for each pair")
        if len(self.windows) != self.num_layers:
            raise ValueError(f"{len(self.windows)} windows for {self.num_layers} layers")
        if any(w is not None and (type(w) is not int or w < 1) for w in self.windows):
            raise ValueError("a sliding window must be at least 1 token")
        if not 0.0 <= self.norm_epsilon < 1.0:
            raise ValueError(f"norm_epsilon must lie in 0..1, not {self.norm_epsilon!r}")
        if self.activation != "silu":
            raise ValueError(f"activation {self.activation!r} is not supported, only silu")

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ModelSpec:
        """Raises ValueError for anything that `to_json` could not have written."""
        names = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(value, Mapping) or set(value) != names:
            raise ValueError("a model description has other fields than this version knows")
        fields = dict(value)
        try:
            fields["inverse_frequencies"] = tuple(float(f) for f in value["inverse_frequencies"])
            fields["windows"] = tuple(value["windows"])
            fields["norm_epsilon"] = float(value["norm_epsilon"])
        except (TypeError, OverflowError) as error:
            raise ValueError(f"a model description is malformed: {error}") from error
        return cls(**fields)


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every weight of the model by role, with its shape; matrices are [outputs, inputs].

    Roles are `embedding`, `final_norm`, `head` and `layers.N.` followed by `query`, `key`, `value`,
    `output`, `gate`, `up`, `down` (`.weight`, `.bias`), `attention_norm`, `mlp_norm`, `query_norm`,
    `key_norm`.
    """
    hidden, ffn = spec.hidden_size, spec.ffn_columns
    query, kv = spec.num_heads * spec.head_size, spec.num_kv_heads * spec.head_size
    matrices = {
        "query": (query, hidden, spec.qkv_bias),
        "key": (kv, hidden, spec.qkv_bias),
        "value": (kv, hidden, spec.qkv_bias),
        "output": (hidden, query, spec.output_bias),
        "gate": (ffn, hidden, spec.mlp_bias),
        "up": (ffn, hidden, spec.mlp_bias),
        "down": (hidden, ffn, spec.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {"embedding": (spec.vocab_size, hidden)}
    for layer in range(spec.num_layers):
        prefix = f"layers.{layer}."
        for role, (rows, columns, bias) in matrices.items():
            shapes[f"{prefix}{role}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}{role}.bias"] = (rows,)
        shapes[f"{prefix}attention_norm"] = (hidden,)
        shapes[f"{prefix}mlp_norm"] = (hidden,)
        if spec.query_key_norm:
            shapes[f"{prefix}query_norm"] = (spec.head_size,)
            shapes[f"{prefix}key_norm"] = (spec.head_size,)
    shapes["final_norm"] = (hidden,)
    shapes["head"] = (spec.vocab_size, hidden)
    return shapes
