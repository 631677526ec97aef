"""How many tokens of keys and values the peers keep in memory and on disk. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from edge.errors import CapacityError
from edge.partition import ClusterSpec, ModelFacts, Plan, Workload, memory_use
from edge.partition.plan.shard import num_local_kv_heads
from edge.planning.load_sizes import LoadSizes
from edge.protocol.peer_info import PeerInfo
from edge.protocol.step import StepLimits


def with_kv_memory(sizes: LoadSizes, facts: ModelFacts, peers: Sequence[PeerInfo]) -> LoadSizes:
    """The sizes with the KV memory to reserve before a plan exists.

    As if each peer that limits its KV memory held all layers; `kv_limits` computes it for a plan.
    """
    kinds = [facts.kinds[kind] for kind in facts.layers]
    token_bytes = sum(kind.token_bytes for kind in kinds)
    state_bytes = sum(kind.num_kv_heads * kind.state_bytes for kind in kinds)
    window_bytes = sum(kind.num_kv_heads * kind.window_bytes for kind in kinds)
    limited = [peer.kv_memory_bytes for peer in peers if peer.kv_memory_bytes is not None]
    if not limited or not token_bytes:
        return sizes
    for tried in with_fewer_states(sizes):
        fixed_bytes = tried.limits.states * state_bytes + tried.limits.windows * window_bytes
        tokens = max(1, (min(limited) - fixed_bytes) // token_bytes)
        if tokens >= tried.limits.context_tokens:
            break
    return replace(tried, kv_tokens=min(tokens, tried.limits.cached_tokens))


def with_fewer_states(sizes: LoadSizes) -> Iterator[LoadSizes]:
    """Sizes to try in turn: memory for as many copies of states as wished, for one, for none.
    Copies of windows have no memory of their own."""
    yield sizes
    for fewer in () if sizes.limits.windows else (1, 0):
        if fewer < sizes.limits.saved_states:
            yield sizes.with_saved_states(fewer)


def with_less_kv_memory(sizes: LoadSizes, peers: Sequence[PeerInfo]) -> Iterator[LoadSizes]:
    """Further sizes to try where those do not fit: half of the KV memory each time, the rest on
    disk."""
    if not all(peer.kv_disk_bytes for peer in peers):
        return
    tokens = sizes.kv_tokens // 2
    while tokens >= sizes.limits.chunk_tokens:
        yield replace(sizes, kv_tokens=tokens)
        tokens //= 2


def kv_limits(
    limits: StepLimits,
    plan: Plan,
    facts: ModelFacts,
    cluster: ClusterSpec,
    peers: Sequence[PeerInfo],
) -> StepLimits:
    """`limits` for this plan: tokens that every shard has memory for, and disk.

    cluster: devices whose memory is for weights and KV caches. `limits.cached_tokens` is the upper
    bound of the tokens in memory. Raises CapacityError where the longest context fits neither
    memory nor disk.
    """
    by_id = {peer.id: peer for peer in peers}
    windows = max(1, limits.windows)
    one = Workload(prompt_tokens=1, output_tokens=0, states=limits.states, windows=windows)
    use = memory_use(plan, facts, one)
    # Without copies.
    moved = memory_use(plan, facts, replace(one, states=limits.requests, windows=limits.requests))
    cached, disk = limits.cached_tokens, limits.context_tokens * limits.requests
    for device, each in use.items():
        if not each.kv_bytes:
            continue
        peer = by_id[device]
        spec = cluster.device(device)
        free_bytes = spec.memory_bytes - each.on(spec).weight_bytes
        if peer.kv_memory_bytes is not None:
            free_bytes = min(free_bytes, peer.kv_memory_bytes)
        cached = min(cached, (free_bytes - each.state_bytes) // each.kv_bytes)
        moved_bytes = moved[device].state_bytes
        disk = min(disk, max(0, peer.kv_disk_bytes - moved_bytes) // each.kv_bytes)
    cached = max(cached, 0)
    longest = max(cached, min(longest_tokens(cached, plan, facts), disk))
    if limits.context_tokens > longest:
        raise CapacityError(
            f"a context of {limits.context_tokens} tokens does not fit: the peers have memory for "
            f"keys and values of {cached} tokens and disk for {disk}, so {longest} is the longest",
            remedy="load the model with fewer context_tokens, or give the peers more --kv-memory "
            "or --kv-disk",
        )
    return replace(limits, cached_tokens=cached, disk_tokens=disk)


def longest_tokens(cached_tokens: int, plan: Plan, facts: ModelFacts) -> int:
    """The longest request whose KV cache can be computed layer by layer.

    A window of layers then uses the memory that is kept for `cached_tokens` of every layer; each
    layer in the window has its whole cache in memory.
    """
    found: list[int] = []
    for stage in plan.stages:
        for shard in stage.slices:
            sizes = [
                (num_local_kv_heads(part.heads, layer) * layer.kv_bytes_per_token, count)
                for part, layer, count in shard.cached(stage.layers, facts)
            ]
            largest = max(size for size, _ in sizes)
            if largest:
                all_bytes = cached_tokens * sum(size * count for size, count in sizes)
                found.append(all_bytes // largest)
    return min(found, default=cached_tokens)
