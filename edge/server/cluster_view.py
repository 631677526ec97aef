"""The cluster as a server's clients see it: JSON for the page, `edge top` and scripts. Pure."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from edge.api.async_model import AsyncModel
from edge.planning.proposal import Proposal
from edge.protocol.peer_info import PeerInfo
from edge.protocol.topology import Seat
from edge.server.metrics import Metrics
from edge.server.observer import LastSeen

Json = dict[str, Any]


def plan_view(proposal: Proposal, names: Mapping[str, str]) -> Json:
    """What would run where, and how fast that should be.

    names: of devices, by id. devices: in the order of the plan, what each has of the model; of its
    layers, `streamed_layers` are brought into memory for each step, `host_layers` of them from its
    host's memory and the others from its disk. links: between them, as measured. predicted: of a
    reply alone, null where the devices were not measured; tokens_per_s_range: what slow and fast
    minutes would make its rate.
    """
    predicted = proposal.choice.predicted
    used = set(proposal.plan.devices)
    return {
        "devices": [
            {
                "name": names[row.device],
                "stage": row.stage,
                "layers": [row.layers.start, row.layers.stop],
                "has": row.in_words,
                "streamed_layers": row.streamed_layers,
                "host_layers": row.host_layers,
                "memory_bytes": row.memory.total,
                "weight_bytes": row.memory.weight_bytes,
                "kv_bytes": row.memory.kv_bytes,
                "left_bytes": row.left_bytes,
            }
            for row in proposal.rows
        ],
        "links": [
            {
                "source": names[link.source],
                "target": names[link.target],
                "latency_s": link.latency_s,
                "bytes_per_s": link.bytes_per_s,
            }
            for link in proposal.cluster.links
            if {link.source, link.target} <= used
        ],
        "predicted": None
        if predicted is None
        else {
            "tokens_per_s": predicted.tokens_per_s,
            "tokens_per_s_range": list(predicted.tokens_per_s_range),
            "first_token_s": predicted.first_token_s,
        },
    }


def cluster_view(model: AsyncModel, observed: LastSeen, metrics: Metrics, *, answers: int) -> Json:
    """What runs where, how fast it should be, and how it is doing. No secret is in it, no prompt.

    In addition to what `plan_view` has: model: its name, format and context. devices: with their
    health, with `decode`, where the time of their steps went so far, in seconds, and with `tiers`,
    the bytes that lie elsewhere than in their memory now, and of beginnings of prompts; null where
    that is not known. spares: peers without a part. answers: under way or waiting; replies: those
    that have begun. measured: of the last reply of 8 tokens or more. recoveries: how it went on
    after devices were lost, or joined, the first time first; returns: of peers that had not
    answered, each with the number of recoveries before it. Counters (new_tokens, decode) only grow
    while `loads` is the same; `at_s` is when they were read.
    """
    proposal = model.proposal
    peers = model.peers
    view = plan_view(proposal, {id: peer.name for id, peer in peers.items()})
    ranks: Counter[int] = Counter()
    for row, device in zip(proposal.rows, view["devices"], strict=True):
        seat = (row.stage, ranks[row.stage])
        ranks[row.stage] += 1
        times = observed.decode.get(seat)
        device["health"] = _health(observed, row.device)
        device["decode"] = None if times is None else asdict(times)
        device["tiers"] = _tiers(observed.peers.get(row.device), proposal.plan.model, seat)
    used = set(proposal.plan.devices)
    return view | {
        "at_s": time.monotonic(),
        "loads": len(model.recoveries),
        "model": {
            "name": model.name,
            "dtype": proposal.dtype,
            "context_tokens": model.context_tokens,
            "can_chat": model.can_chat,
            "is_over": model.is_over,
            "is_recovering": model.is_recovering,
        },
        "recoveries": [
            {
                "reason": recovery.reason,
                "pause_s": recovery.pause_s,
                "answers": recovery.requests,
            }
            for recovery in model.recoveries
        ],
        "returns": [asdict(each) for each in observed.returns],
        "spares": [
            {"name": name, "health": _health(observed, id), "free_bytes": _free_bytes(observed, id)}
            for id, name in (
                observed.names or {id: peer.name for id, peer in peers.items()}
            ).items()
            if id not in used
        ],
        "answers": answers,
        "replies": metrics.under_way(),
        "new_tokens": metrics.new_tokens,
        "measured": {"tokens_per_s": metrics.last_tokens_per_s},
    }


def _health(observed: LastSeen, device: str) -> str:
    """One word; of a peer that was not asked yet, that it is alive."""
    if device not in observed.peers:
        return "alive"
    peer = observed.peers[device]
    return "no answer" if peer is None else peer.health


def _free_bytes(observed: LastSeen, device: str) -> int | None:
    """What another model may take there."""
    peer = observed.peers.get(device)
    return None if peer is None else peer.model_free_bytes


def _tiers(peer: PeerInfo | None, model: str, seat: Seat) -> Json | None:
    """streamed_bytes: of weights, that each step reads from disk. kv_host_bytes and kv_disk_bytes:
    of keys and values that are not in the device's memory. kept_bytes and kept_disk_bytes: of
    beginnings of earlier prompts, whatever the model, in memory and on disk."""
    if peer is None:
        return None
    shards = [each for each in peer.models if (each.name, each.stage, each.rank) == (model, *seat)]
    return {
        "streamed_bytes": sum(each.streamed_bytes for each in shards),
        "kv_host_bytes": sum(each.kv_host_bytes for each in shards),
        "kv_disk_bytes": sum(each.kv_disk_bytes for each in shards),
        "kept_bytes": peer.kv_beginnings_bytes,
        "kept_disk_bytes": peer.kv_prefix_bytes,
    }
