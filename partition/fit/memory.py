"""How many bytes a plan asks of each device. Counts what facts say; allocates nothing."""

from dataclasses import dataclass

from partition.plan.facts import ModelFacts, Workload
from partition.plan.plan import Plan, Shard
from partition.plan.ranges import kv_group_size

WINDOW_LAYERS = 2
"""Streamed layers held at once: one computes while the other is filled. Whatever the rates of disk
and processor, memory for a third serves better as one more layer that stays: where the disk is what
a token waits for, that saves it a layer's reading; where it is not, nothing waits. This holds to
within a layer's computing, as those that stay are spread among those that are read
(`tests/property/test_window.py`), where computing is steady. On two cores that eight others wanted,
it was not: there a window of three gave 1.2 to 2.7 times the tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """What one device must hold."""

    weight_bytes: int
    """Held all the time, the window of streamed layers included."""
    kv_bytes: int
    """KV cache for the whole workload."""
    streamed_bytes: int = 0
    """Read from disk for each step."""

    @property
    def total(self) -> int:
        return self.weight_bytes + self.kv_bytes


def memory_use(plan: Plan, model: ModelFacts, workload: Workload) -> dict[str, MemoryUse]:
    """Bytes by device id, in the order of `plan.devices`.

    First-stage shards hold embedding rows and last-stage shards head rows; also with tied
    embeddings, because the two are stored in different types. A shard that streams layers leaves
    its embedding on disk, too: a token needs one row of it. KV heads that a shard holds more
    than once (see `kv_heads`) are counted as often. PlanError when the plan is not for `model`.
    """
    plan.validate(model, None)
    last = len(plan.stages) - 1
    return {
        shard.device: _shard_use(
            shard,
            len(stage.layers),
            (model.embedding_row_bytes if number == 0 and not shard.streamed_layers else 0)
            + (model.head_row_bytes if number == last else 0),
            model,
            workload,
        )
        for number, stage in enumerate(plan.stages)
        for shard in stage.shards
    }


def _shard_use(
    shard: Shard, num_layers: int, vocab_row_bytes: int, model: ModelFacts, workload: Workload
) -> MemoryUse:
    kv_count = num_local_kv_heads(shard.heads, model)
    matrix_bytes = layer_matrix_bytes(shard, model)
    streamed = shard.streamed_layers
    window = min(streamed, WINDOW_LAYERS)
    held = num_layers - streamed + window
    return MemoryUse(
        weight_bytes=held * matrix_bytes
        + num_layers * model.layer_bytes
        + len(shard.vocab) * vocab_row_bytes,
        kv_bytes=num_layers * kv_count * model.kv_bytes_per_token * workload.cached_tokens,
        streamed_bytes=streamed * matrix_bytes if streamed > window else 0,
    )


def layer_matrix_bytes(shard: Shard, model: ModelFacts) -> int:
    """Of one layer: what the shard streams, where it streams; norms and biases stay."""
    return (
        len(shard.heads) * model.query_head_bytes
        + num_local_kv_heads(shard.heads, model) * model.kv_head_bytes
        + len(shard.ffn_columns) * model.ffn_column_bytes
    )


def num_local_kv_heads(heads: range, model: ModelFacts) -> int:
    """`len(kv_heads(...))`, without making the tuple."""
    size = kv_group_size(heads, model.num_heads, model.num_kv_heads)
    return len(heads) // size if size else 0


def units_that_fit(room_bytes: int, unit_bytes: int, most: int) -> int:
    """How many units go into the room, at most `most`; -1 when the room itself is negative."""
    if room_bytes < 0:
        return -1
    return min(most, room_bytes // unit_bytes) if unit_bytes else most
