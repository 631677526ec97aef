"""Which slices of which weights one shard holds, and how they are fused.

Pure: from a model, a stage and a rank to names and ranges. The coordinator reads by it, the back
end builds by it, so both agree on every shape without saying so over the wire.
"""

from __future__ import annotations

from dataclasses import dataclass

from edge.models.spec import ModelSpec
from partition import Plan, kv_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixSlice:
    """Rows of one or more weight matrices on top of each other, or columns of one matrix."""

    name: str
    parts: tuple[tuple[str, range], ...]
    """(role, rows) in order; rows index the whole matrix."""
    columns: range
    """Columns of the whole matrix; all of them for a slice by rows."""

    @property
    def num_rows(self) -> int:
        return sum(len(rows) for _role, rows in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorSlice:
    """Pieces of one-dimensional weights, one after the other."""

    name: str
    parts: tuple[tuple[str, range], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLayout:
    """One device's slice of a stage, in local sizes and in slices of the checkpoint."""

    layers: range
    num_heads: int
    num_kv_heads: int
    ffn_columns: int
    vocab: range
    is_first_stage: bool
    is_last_stage: bool
    is_split: bool
    """The stage has other shards, so its results must be summed over them."""
    matrices: tuple[MatrixSlice, ...]
    vectors: tuple[VectorSlice, ...]
    embedding: range
    """Rows of the embedding table this shard holds; it keeps the checkpoint's own type."""
    streamed_layers: int
    """So many of the layers have their matrices read from disk for each step."""

    @property
    def num_weights(self) -> int:
        """Of the matrices: what a decode step reads."""
        return sum(matrix.num_rows * len(matrix.columns) for matrix in self.matrices)

    def matrix(self, name: str) -> MatrixSlice:
        return next(m for m in self.matrices if m.name == name)


def shard_layout(spec: ModelSpec, plan: Plan, *, stage: int, rank: int) -> ShardLayout:
    """The layout of shard `rank` of stage `stage`.

    Split what produces heads and ffn columns by rows and what consumes them by columns, so that one
    sum after each consumer is all a layer needs (Shoeybi et al., Megatron-LM, 2019). The bias of
    a consumer is added once, by the first shard that has anything to consume.
    """
    this = plan.stages[stage]
    shard = this.shards[rank]
    first, last = stage == 0, stage == len(plan.stages) - 1
    size = spec.head_size
    query = range(shard.heads.start * size, shard.heads.stop * size)
    local_kv = kv_heads(shard.heads, spec.num_heads, spec.num_kv_heads) if shard.heads else ()
    kv = tuple(range(head * size, (head + 1) * size) for head in local_kv)
    adds_output_bias = rank == next(i for i, s in enumerate(this.shards) if s.heads)
    adds_down_bias = rank == next(i for i, s in enumerate(this.shards) if s.ffn_columns)
    hidden = range(spec.hidden_size)
    ffn = shard.ffn_columns
    matrices: list[MatrixSlice] = []
    vectors: list[VectorSlice] = []
    for layer in this.layers:
        p = f"layers.{layer}."

        def fused_qkv(suffix: str, p: str = p) -> tuple[tuple[str, range], ...]:
            return (
                (f"{p}query.{suffix}", query),
                *((f"{p}key.{suffix}", rows) for rows in kv),
                *((f"{p}value.{suffix}", rows) for rows in kv),
            )

        if shard.heads:
            matrices.append(MatrixSlice(name=f"{p}qkv", parts=fused_qkv("weight"), columns=hidden))
            matrices.append(
                MatrixSlice(
                    name=f"{p}output", parts=((f"{p}output.weight", hidden),), columns=query
                )
            )
            vectors.append(_whole(f"{p}attention_norm", spec.hidden_size))
            if spec.qkv_bias:
                vectors.append(VectorSlice(name=f"{p}qkv.bias", parts=fused_qkv("bias")))
            if spec.query_key_norm:
                vectors.append(_whole(f"{p}query_norm", size))
                vectors.append(_whole(f"{p}key_norm", size))
        if spec.output_bias and adds_output_bias:
            vectors.append(_whole(f"{p}output.bias", spec.hidden_size))
        if ffn:
            gate_up = ((f"{p}gate.weight", ffn), (f"{p}up.weight", ffn))
            matrices.append(MatrixSlice(name=f"{p}gate_up", parts=gate_up, columns=hidden))
            matrices.append(
                MatrixSlice(name=f"{p}down", parts=((f"{p}down.weight", hidden),), columns=ffn)
            )
            vectors.append(_whole(f"{p}mlp_norm", spec.hidden_size))
            if spec.mlp_bias:
                biases = ((f"{p}gate.bias", ffn), (f"{p}up.bias", ffn))
                vectors.append(VectorSlice(name=f"{p}gate_up.bias", parts=biases))
        if spec.mlp_bias and adds_down_bias:
            vectors.append(_whole(f"{p}down.bias", spec.hidden_size))
    if last and shard.vocab:
        vectors.append(_whole("final_norm", spec.hidden_size))
        matrices.append(MatrixSlice(name="head", parts=(("head", shard.vocab),), columns=hidden))
    return ShardLayout(
        layers=this.layers,
        num_heads=len(shard.heads),
        num_kv_heads=len(local_kv),
        ffn_columns=len(ffn),
        vocab=shard.vocab if last else range(0),
        is_first_stage=first,
        is_last_stage=last,
        is_split=len(this.shards) > 1,
        matrices=tuple(matrices),
        vectors=tuple(vectors),
        embedding=shard.vocab if first else range(0),
        streamed_layers=shard.streamed_layers,
    )


def _whole(role: str, length: int) -> VectorSlice:
    return VectorSlice(name=role, parts=((role, range(length)),))
