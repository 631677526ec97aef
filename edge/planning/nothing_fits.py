"""The text of the error when nothing fits: memory missing by device, and remedies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from edge import partition
from edge.host.free_memory import format_size
from edge.partition import Choice, ClusterSpec, Plan, Stage, whole_shard
from edge.planning.choosing import choose_plan, facts_of
from edge.planning.load_options import LoadOptions
from edge.planning.load_sizes import LoadSizes
from edge.planning.rate_words import rate_in_words
from edge.protocol.peer_info import PeerInfo
from edge.weights.checkpoint import Checkpoint
from edge.weights.formats import FEW_BITS, Dtype

_MOST_HELD = 8
"""Loaded models that are named at most."""


def nothing_fits(
    error: partition.CapacityError,
    checkpoint: Checkpoint,
    cluster: ClusterSpec,
    options: LoadOptions,
    sizes: LoadSizes,
) -> str:
    """Memory missing by device for the longest context, and remedies."""
    told = _of_context(error, sizes.limits.context_tokens)
    hint = _what_would_fit(checkpoint, cluster, options, sizes)
    streamed = _even_streamed if sizes.stream else _if_streamed
    return f"{told} {hint}{streamed(checkpoint, cluster, options, sizes)}"


def who_holds(peers: Sequence[PeerInfo]) -> str:
    """A sentence with the models that are loaded on these peers; empty without any."""
    held = [f"{peer.name} holds {model.held}" for peer in peers for model in peer.models]
    more = f", and {len(held) - _MOST_HELD} more" if len(held) > _MOST_HELD else ""
    return f"Now {', '.join(held[:_MOST_HELD])}{more}." if held else ""


def _of_context(error: partition.CapacityError, context_tokens: int) -> partition.CapacityError:
    """The error with the longest context in place of the workload's.

    Memory is kept for the longest context; the two are in proportion.
    """
    largest = error.largest_context_tokens
    if largest is not None:
        largest = largest * context_tokens // error.context_tokens
    return partition.CapacityError(
        error.shortages, context_tokens=context_tokens, largest_context_tokens=largest or None
    )


def _what_would_fit(
    checkpoint: Checkpoint, cluster: ClusterSpec, options: LoadOptions, sizes: LoadSizes
) -> str:
    """A sentence with the most precise smaller format that has a plan."""
    for smaller in _smaller(checkpoint, options):
        try:
            choose_plan(checkpoint, cluster, smaller, sizes)
        except partition.PartitionError:
            continue
        size = smaller.block_size
        blocks = "" if size is None else f" in blocks of {size}"
        price = ", which makes answers much worse," if smaller.dtype in FEW_BITS else ""
        return f"With {smaller.dtype}{blocks}{price} it would fit."
    return "No smaller dtype would be enough by itself."


def _if_streamed(
    checkpoint: Checkpoint, cluster: ClusterSpec, options: LoadOptions, sizes: LoadSizes
) -> str:
    """A sentence on weight offload, where that makes the model fit; else empty."""
    if isinstance(options.plan, Plan):
        return ""
    try:
        choice = choose_plan(checkpoint, cluster, options, replace(sizes, stream=True))
    except partition.PartitionError:
        return ""
    return (
        " Or let it read what does not fit from disk for each token (--stream auto, "
        f'stream="auto"): {layers_and_speed(choice)}.'
    )


def layers_and_speed(choice: Choice) -> str:
    """Number of layers that are read from disk, and the predicted speed."""
    layers = sum(max(s.streamed_layers for s in stage.slices) for stage in choice.plan.stages)
    speed = "at an unknown speed"
    if choice.predicted is not None:
        predicted = choice.predicted
        rate = rate_in_words(predicted.tokens_per_s, predicted.tokens_per_s_range)
        speed = f"at about {rate} tok/s"
    return f"{layers} of {choice.plan.stages[-1].layers.stop} layers, {speed}"


def _even_streamed(
    checkpoint: Checkpoint, cluster: ClusterSpec, options: LoadOptions, sizes: LoadSizes
) -> str:
    """A sentence with the least memory of one device that runs the whole model from its disk."""
    if not cluster.devices:
        return ""
    facts = facts_of(checkpoint, options, sizes.limits)
    workload = sizes.workload
    device = max(cluster.devices, key=lambda each: each.memory_bytes)
    shard = whole_shard(
        device.id, facts, vocab=range(facts.vocab_size), streamed_layers=facts.num_layers
    )
    plan = Plan(
        model=facts.name,
        version=0,
        stages=(Stage(layers=range(facts.num_layers), shards=(shard,)),),
    )
    use = partition.memory_use(plan, facts, workload)[device.id].on(device)
    head_bytes = facts.vocab_size * facts.head_row_bytes
    norm_bytes = sum(facts.kinds[kind].layer_bytes for kind in facts.layers)
    window_bytes = use.weight_bytes - head_bytes - norm_bytes
    return (
        f" Even with every layer read from disk it takes {format_size(use.total)} on one device"
        f" ({format_size(window_bytes)} for the layer that computes and the one that is read"
        f" meanwhile, {format_size(head_bytes)} for the head, {format_size(norm_bytes)} for norms"
        f" and biases, {format_size(use.kv_bytes)} for {workload.cached_tokens} tokens of keys and"
        f" values), and {device.name} has {format_size(device.memory_bytes)} for it, apart from"
        " the memory of its process and its steps."
    )


def _smaller(checkpoint: Checkpoint, options: LoadOptions) -> Iterator[LoadOptions]:
    """The options with formats of fewer bytes, largest first."""
    now_bytes = _layer_bytes(checkpoint, options)
    smaller_ones: tuple[tuple[Dtype, int | None], ...] = (
        ("int8", options.block_size),
        ("int4", options.block_size),
        ("int4", 128),
        ("int4-pure", 128),
        ("int3", options.block_size),
        ("int2", options.block_size),
        ("int3", 128),
        ("int2", 128),
    )
    for dtype, block_size in smaller_ones:
        smaller = replace(options, dtype=dtype, block_size=block_size)
        if _layer_bytes(checkpoint, smaller) < now_bytes:
            yield smaller


def _layer_bytes(checkpoint: Checkpoint, options: LoadOptions) -> int:
    facts = facts_of(checkpoint, options, options.limits(checkpoint.spec))
    return sum(facts.kinds[kind].weight_bytes for kind in facts.layers)
