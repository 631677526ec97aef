"""The cluster as a server's clients see it: JSON for the page, `edge top` and scripts. Pure."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from edge.api.async_model import AsyncModel
from edge.planning.proposal import Proposal
from edge.server.metrics import Metrics
from edge.server.observer import Observed

Json = dict[str, Any]


def plan_view(proposal: Proposal, names: Mapping[str, str]) -> Json:
    """What would run where, and how fast that should be.

    names: of devices, by id. devices: in the order of the plan, what each has of the model. links:
    between them, as measured. predicted: of a reply alone, null where the devices were not
    measured.
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
            "first_token_s": predicted.first_token_s,
        },
    }


def cluster_view(model: AsyncModel, observed: Observed, metrics: Metrics, *, answers: int) -> Json:
    """What runs where, how fast it should be, and how it is doing. No secret is in it, no prompt.

    Beside what `plan_view` has: model: its name, format and context. devices: with their health,
    and with `decode`, where the time of their steps went so far, in seconds; null where that is
    not known. spares: peers without a part. answers: under way or waiting; replies: those that
    have begun. measured: of the last reply of 8 tokens or more. recoveries: how it went on after
    devices were lost, or joined, the first time first. Counters (new_tokens, decode) only grow
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
        "spares": [
            {
                "name": peer.name,
                "health": _health(observed, id),
                "free_bytes": (observed.peers.get(id) or peer).model_free_bytes,
            }
            for id, peer in peers.items()
            if id not in used
        ],
        "answers": answers,
        "replies": metrics.under_way(),
        "new_tokens": metrics.new_tokens,
        "measured": {"tokens_per_s": metrics.last_tokens_per_s},
    }


def _health(observed: Observed, device: str) -> str:
    """One word; of a peer that was not asked yet, that it is alive."""
    if device not in observed.peers:
        return "alive"
    peer = observed.peers[device]
    return "no answer" if peer is None else peer.health
