"""A proposal from measurements of peers and links, new or remembered."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Literal

from edge.errors import CapacityError
from edge.host.cache_paths import cache_root
from edge.models.spec import WINDOWED_KV
from edge.partition import ClusterSpec, Plan
from edge.planning.able_peers import needs_of, some_able_peers
from edge.planning.choosing import facts_of
from edge.planning.cluster_profile import forget_device, forget_link, measured_cluster
from edge.planning.kv_limits import with_fewer_states, with_kv_memory, with_less_kv_memory
from edge.planning.load_options import LoadOptions
from edge.planning.load_sizes import LoadSizes
from edge.planning.longest_context import with_longest_context
from edge.planning.nothing_fits import who_holds
from edge.planning.overhead import Overhead, step_buffers, unused_buffers
from edge.planning.proposal import ROUGH, Proposal, propose
from edge.planning.proving import wrong_peers
from edge.planning.shared_memory import with_memory_divided
from edge.progress import OnProgress
from edge.protocol.peer_info import PeerInfo
from edge.weights.checkpoint import Checkpoint

Measure = Literal["nothing", "needed", "missing", "again"]
"""Measurements to take before planning: nothing; a first look at what is missing and can change the
plan; all missing ones; all again."""


async def measured_proposal(
    checkpoint: Checkpoint,
    peers: Sequence[PeerInfo],
    options: LoadOptions,
    *,
    measure: Measure,
    on_progress: OnProgress,
    changes: Sequence[str] = (),
) -> Proposal:
    """Like `propose`, for the measured cluster with `changes` made to it.

    With `stream="auto"`, layers are read from disk only where no other plan exists. A plan in
    memory gets the longest context that has room, unless `options` name one. Also raises
    PeerLostError.
    """
    LoadSizes.of(options, checkpoint.spec)  # refused before anything is measured
    weight_format = options.weight_format(checkpoint)
    needs = needs_of(checkpoint.spec, weight_format, options.kv_dtype)
    wrong: dict[str, str] = {}
    if measure != "nothing":
        asked = [peer for peer in peers if not peer.lacking(needs)]
        wrong = await wrong_peers(asked, weight_format, cache_root=cache_root())
    peers, unused = some_able_peers(peers, needs, options.plan, wrong)
    notes = [*unused]
    may_keep_windows = not any(WINDOWED_KV in peer.lacks for peer in peers)
    sizes = LoadSizes.of(options, checkpoint.spec, may_keep_windows=may_keep_windows)
    sizes = with_kv_memory(sizes, facts_of(checkpoint, options, sizes.limits), peers)

    def look() -> None:
        if ROUGH not in notes:
            notes.append(ROUGH)

    def measured(*, only_known: bool) -> Awaitable[ClusterSpec]:
        return measured_cluster(
            peers,
            weight_format.graded(checkpoint.spec),
            weight_format,
            cache_root=cache_root(),
            on_progress=on_progress,
            on_note=notes.append,
            refresh=measure == "again",
            only_known=only_known,
            only_remembered=measure == "nothing",
            on_rough=look if measure == "needed" else None,
        )

    only_known = measure == "needed" and not _can_change(peers, options)
    known = await measured(only_known=only_known)

    def proposed(sizes: LoadSizes) -> Proposal:
        """The proposal with the most copies of states that have room."""
        *more, fewest = with_fewer_states(sizes)
        for tried in more:
            with contextlib.suppress(CapacityError):
                return _proposed(checkpoint, known, options, tried, peers, changes, notes)
        return _proposed(checkpoint, known, options, fewest, peers, changes, notes)

    # Memory for further copies is better used by layers, which are read for each token otherwise.
    # Copies of windows have no memory of their own.
    saved = sizes.limits.saved_states
    streamed = sizes.with_saved_states(saved if sizes.limits.windows else min(1, saved))
    streamed = replace(streamed, stream=True)
    if sizes.stream:
        return proposed(streamed)
    try:
        found = proposed(sizes)
    except CapacityError:
        if isinstance(options.plan, Plan) or options.stream == "off":
            raise
    else:
        return with_longest_context(found, checkpoint.spec, options, peers)
    if only_known and measure != "nothing":  # for the predicted speed, told before the load
        notes[:] = unused
        known = await measured(only_known=False)
    return proposed(streamed)


def _proposed(
    checkpoint: Checkpoint,
    known: ClusterSpec,
    options: LoadOptions,
    sizes: LoadSizes,
    peers: Sequence[PeerInfo],
    changes: Sequence[str],
    notes: Sequence[str],
) -> Proposal:
    """`propose` with the peers' memory for weights and KV caches, then with less KV memory."""
    limits = replace(sizes.limits, cached_tokens=sizes.kv_tokens)
    if any(peer.kv_disk_bytes for peer in peers):  # how much of it is used depends on the plan
        limits = replace(limits, disk_tokens=limits.context_tokens)
    taken = step_buffers(
        checkpoint.spec, limits, peers, stream=sizes.stream, kv_dtype=options.kv_dtype
    )
    unused = unused_buffers(checkpoint.spec, limits, peers, kv_dtype=options.kv_dtype)
    known = replace(
        known,
        devices=tuple(
            replace(
                peer.device(buffer_bytes=taken[peer.id], unused_bytes=unused[peer.id]),
                rates=device.rates,
            )
            for device, peer in zip(known.devices, peers, strict=True)
        ),
    )

    told = [checkpoint.note, *notes] if checkpoint.note else notes

    def proposed(cluster: ClusterSpec) -> Proposal:
        try:
            return propose(checkpoint, cluster, options, sizes, changes=changes, notes=told)
        except CapacityError as error:
            for less in with_less_kv_memory(sizes, peers):
                with contextlib.suppress(CapacityError):
                    return propose(checkpoint, cluster, options, less, changes=changes, notes=told)
            if held := who_holds(peers):
                raise CapacityError(f"{error} {held}") from error
            raise

    found = proposed(known)
    planned = {row.device: row.memory.total for row in found.rows}
    divided = with_memory_divided(known, peers, planned, taken)
    if divided is not None:
        found = proposed(divided)
    return replace(found, overhead=Overhead.of(peers, taken))


def _can_change(peers: Sequence[PeerInfo], options: LoadOptions) -> bool:
    """Whether measurements can change the plan or the wire formats."""
    by_hand = isinstance(options.plan, Plan) and options.wire != "auto"
    return len(peers) > 1 and not by_hand


def forget_measured(peers: Sequence[PeerInfo]) -> None:
    """Measure these peers and the links between them again at the next plan."""
    for peer in peers:
        forget_device(peer, cache_root=cache_root())
    for one, other in combinations(peers, 2):
        forget_link(one, other, cache_root=cache_root())
