"""The longest context that fits the memory which a plan leaves free. Pure.

The plan is chosen for a usual context and does not change: a longer context must not make tokens
slower. The context grows into half of each device's free memory. The other half is for further
models and for other programs. Daemons of one machine share its half.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from edge.errors import CapacityError
from edge.memory.model_sizes import facts_with_windows
from edge.models.attention import Attention
from edge.models.spec import WINDOWED_KV, ModelSpec
from edge.partition import ClusterSpec
from edge.planning.kv_limits import kv_limits, with_kv_memory
from edge.planning.load_options import LoadOptions
from edge.planning.load_sizes import LoadSizes
from edge.planning.losses import can_lose
from edge.planning.overhead import step_buffers, unused_buffers
from edge.planning.proposal import Proposal
from edge.protocol.peer_info import PeerInfo


def with_longest_context(
    found: Proposal, spec: ModelSpec, options: LoadOptions, peers: Sequence[PeerInfo]
) -> Proposal:
    """The same plan with the longest of `longer_contexts` that has room in memory, if any.

    found: for these peers, with overheads, all in memory. options: as they were asked for.
    """
    contexts = longer_contexts(options, spec)
    first = next(contexts, None)
    if first is None:
        return found
    most_bytes = _most_bytes(found)
    losable = functools.cache(lambda id: _can_lose(id, found, options))
    for context_tokens in (first, *contexts):
        longer = _with_context(found, context_tokens, spec, options, peers)
        if _has_room(longer, most_bytes, peers) and all(
            _can_lose(id, longer, options) or not losable(id) for id in found.plan.devices
        ):
            return longer
    return found


def longer_contexts(options: LoadOptions, spec: ModelSpec) -> Iterator[int]:
    """Contexts that may take the place of the default one where memory is left, longest first.

    None where a context was asked for, or where tokens would depend on how long it is.
    """
    if options.context_tokens is not None or options.kv_dtype != "float32":
        return
    usual, most = options.limits(spec).context_tokens, spec.context_tokens
    for kind in spec.kinds:
        if not isinstance(kind.mixer, Attention):
            continue
        rotary = kind.mixer.rotary
        if rotary.is_long(most) and not rotary.is_long(usual):
            most = rotary.trained_tokens
    while most > usual:
        yield most
        most = min(most - 1, max(usual, 1 << (most - 1).bit_length() - 1))


def _most_bytes(found: Proposal) -> Mapping[str, int]:
    """Memory bound of each device of the plan, for weights, KV caches and steps."""
    devices = {each.id: each for each in found.cluster.devices}
    hosts = Counter(devices[id].host or id for id in found.plan.devices)
    most: dict[str, int] = {}
    for row in found.rows:
        device = devices[row.device]
        sharing = 1 if device.host_memory_bytes is not None else hosts[device.host or device.id]
        taken = row.memory.total + _buffer_bytes(found, row.device)
        most[row.device] = taken + max(0, row.left_bytes) // 2 // sharing
    return most


def _buffer_bytes(found: Proposal, device: str) -> int:
    return found.overhead[device].buffer_bytes


def _with_context(
    found: Proposal,
    context_tokens: int,
    spec: ModelSpec,
    options: LoadOptions,
    peers: Sequence[PeerInfo],
) -> Proposal:
    limits = replace(
        found.limits,
        context_tokens=context_tokens,
        cached_tokens=context_tokens * options.concurrency,
    )
    model = found.model
    if not limits.windows and not any(WINDOWED_KV in peer.lacks for peer in peers):
        windows = replace(options, context_tokens=context_tokens).limits(spec)
        if windows.windows:  # it pays behind a longer context
            limits = replace(limits, windows=windows.windows, saved_states=windows.saved_states)
            model = facts_with_windows(model, spec, limits, options.kv_dtype)
    sizes = LoadSizes(
        limits=limits, kv_tokens=limits.cached_tokens, answers=found.workload, stream=False
    )
    taken = step_buffers(spec, limits, peers, stream=False, kv_dtype=options.kv_dtype)
    unused = unused_buffers(spec, limits, peers, kv_dtype=options.kv_dtype)
    devices = tuple(
        replace(
            device,
            memory_bytes=max(
                0, device.memory_bytes - taken[device.id] + _buffer_bytes(found, device.id)
            ),
            unused_buffer_bytes=unused[device.id],
        )
        for device in found.cluster.devices
    )
    return replace(
        found,
        model=model,
        limits=limits,
        cluster=replace(found.cluster, devices=devices),
        workload=with_kv_memory(sizes, model, peers).workload,
        overhead={
            device: replace(each, buffer_bytes=taken[device])
            for device, each in found.overhead.items()
        },
    )


def _has_room(
    longer: Proposal,
    most_bytes: Mapping[str, int],
    peers: Sequence[PeerInfo],
) -> bool:
    """Whether all requests of the whole context have room in memory."""
    devices = tuple(
        replace(
            each,
            memory_bytes=max(
                0, min(each.memory_bytes, most_bytes[each.id] - _buffer_bytes(longer, each.id))
            ),
        )
        for each in longer.cluster.devices
        if each.id in most_bytes
    )
    try:
        kept = kv_limits(
            longer.limits, longer.plan, longer.model, ClusterSpec(devices=devices), peers
        )
    except CapacityError:
        return False
    return kept.cached_tokens == longer.limits.cached_tokens


def _can_lose(device: str, proposal: Proposal, options: LoadOptions) -> bool:
    """Whether the other devices have memory for the model."""
    others = len(proposal.cluster.devices) - 1
    return others > 0 and can_lose(device, proposal, options)
