"""The graphs of a lowered shard, and the steps between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from edge.kernels.onnx_graph import ExternalTensor
from edge.weights.block_matrices import Blocks
from edge.weights.observation import Observed, ObservedExperts

Reduced = Literal["hidden", "partial"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSegment:
    """One graph, and the sum that follows it.

    Inputs and outputs are among `tokens`, `rows`, `hidden`, `partial`, `positions`, the tables of
    `rotation_names`, the sums of `gram_names`, `lengths`, `total`, `past_key_N`, `past_value_N`,
    `key_scales_N`, `value_scales_N` and `hidden_out`, `partial_out`, `logits`, `present_key_N`,
    `present_value_N`; `embedded` and `token_rows_N` where layers have inputs of each token;
    `kept_N` and `kept_out_N` of layers whose input others need; `picture_rows_N` of layers that add
    to rows of pictures; where experts are brought in also
    the fields of `kernels.experts.onnx.Routed` as `expert_…`, then `expert_results`.
    """

    model: bytes
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    reduce: Reduced | None
    """The output that is summed over the stage's shards before the next segment."""
    partial_parts: int
    """Number of hidden states side by side in the summed output."""
    partial_is_zero: bool
    """Whether this shard adds nothing to the sum, because it has no heads or no ffn columns."""
    cache_layer: int | None = None
    """The layer whose keys and values it uses, if no graph has several layers."""
    streamed: Streamed | None = None
    """Set if the matrices are read from disk, once or for each step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Streamed:
    """Facts about a streamed layer's segment.

    Names in its graph lack the layer's number (`past_key`, `qkv.codes`), and vectors are inputs, so
    segments of equal `kind` differ only in the places of their weights.
    """

    layer: int
    kind: str
    vectors: tuple[tuple[str, str], ...]
    """(input, tensor of the shard's file)."""
    experts: StreamedExperts | None = None
    """The experts computed after this graph, from its outputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedExperts:
    """A graph for each expert of a layer, with `x` [1, rows, hidden] and `results`.

    Graphs of a kind differ only in the places of their weights, across all layers.
    """

    kind: str
    models: tuple[bytes, ...]
    biases: tuple[tuple[str, str], ...]
    """(input, tensor of the shard's file with the values of all experts)."""
    top_k: int
    """Number of experts for each row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredStack:
    """The stack of one layer in its files."""

    kind: Blocks
    tensors: Mapping[str, ExternalTensor]
    """Places of the tensors by the names in `StackedWeights`."""


def gram_names(run: Observed) -> tuple[str, str]:
    """Names of the input and output of a run's sums so far, which share their memory."""
    if isinstance(run, ObservedExperts):
        return f"uses_{run.layer}", f"uses_out_{run.layer}"
    matrix, layer = run.matrix, ""
    if matrix.startswith("layers."):
        _layers, number, matrix = matrix.split(".", 2)
        layer = f"_{number}"
    name = f"{matrix}.{run.columns.start}{layer}"
    return f"gram.{name}", f"gram_out.{name}"


def rotation_names(number: int) -> tuple[str, str]:
    """Inputs of the rotary tables [context, pairs] of `ShardLayout.rotations[number]`."""
    return (f"cos.{number}", f"sin.{number}") if number else ("cos", "sin")
