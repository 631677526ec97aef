"""JSON of the cluster's state, for the page, `edge top` and scripts. Pure."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from edge.api.async_model import AsyncModel
from edge.planning.proposal import Proposal
from edge.protocol.peer_info import PeerInfo
from edge.protocol.topology import Seat
from edge.runs.copied_model import RunningCopy
from edge.server.metrics import Metrics
from edge.server.observer import LastSeen

Json = dict[str, Any]


def plan_view(proposal: Proposal, names: Mapping[str, str]) -> Json:
    """A plan and its predicted speed.

    names: of devices, by id. devices: the part of the model on each, in the order of the plan. Of
    its layers, `streamed_layers` are read for each step: `host_layers` of them from the host's
    memory and the others from disk. links: as measured. predicted: for a single reply; null if the
    devices were not measured. tokens_per_s_range: the rate in slow and in fast minutes. notes:
    sentences, such as where images are read.
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
        "notes": list(proposal.notes),
    }


def cluster_view(model: AsyncModel, observed: LastSeen, metrics: Metrics, *, answers: int) -> Json:
    """The plan of a loaded model, its predicted speed and its state. Without secrets and prompts.

    In addition to the fields of `plan_view`: model: its name, format and context. devices: also
    their health; `decode`, the seconds of each part of their steps so far; and `tiers`, the bytes
    outside their memory now, and of cached prefixes; null if unknown. spares: peers without a part.
    copies: empty for one plan; else the answers of each copy, under way and since it was loaded;
    `devices` has those of all copies, and predicted and measured times are the first copy's.
    answers: number under way or waiting; replies: those that have begun. measured: the rate of the
    last reply of 8 tokens or more. guesses: of all answers since the load, and the steps that
    verified them. recoveries: after losses and moves, the first one first.
    returns: peers that answer again, each with the number of recoveries before. Counters
    (new_tokens, decode) only grow while `loads` is the same; `at_s` is when they were read.
    """
    proposal = model.proposal
    peers = model.peers
    view = plan_view(proposal, {id: peer.name for id, peer in peers.items()})
    copies = model.copies
    for copy in copies[1:]:
        more = plan_view(copy.proposal, {id: peer.name for id, peer in peers.items()})
        for row, device in zip(copy.proposal.rows, more["devices"], strict=True):
            device |= {"health": _health(observed, row.device), "decode": None, "tiers": None}
        view["devices"] += more["devices"]
    ranks: Counter[int] = Counter()
    for row, device in zip(proposal.rows, view["devices"], strict=False):
        seat = (row.stage, ranks[row.stage])
        ranks[row.stage] += 1
        times = observed.decode.get(seat)
        device["health"] = _health(observed, row.device)
        device["decode"] = None if times is None else asdict(times)
        device["tiers"] = _tiers(observed.peers.get(row.device), proposal.plan.model, seat)
    used = {
        id for each in (proposal, *(copy.proposal for copy in copies)) for id in each.plan.devices
    }
    return view | {
        "notes": [*model.notes, *([_copies_in_words(copies)] if copies else [])],
        "copies": [
            {"devices": list(each.devices), "answers": each.answers, "answered": each.answered}
            for each in copies
        ],
        "at_s": time.monotonic(),
        "loads": len(model.recoveries),
        "model": {
            "name": model.name,
            "dtype": proposal.dtype,
            "context_tokens": model.context_tokens,
            "can_chat": model.can_chat,
            "reads_pictures": model.reads_pictures,
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
        "guesses": {
            "drafted_tokens": model.work.drafted_tokens,
            "accepted_tokens": model.work.accepted_tokens,
            "steps": model.work.draft_steps,
        },
    }


def _copies_in_words(copies: Sequence[RunningCopy]) -> str:
    said = (
        f"{' and '.join(each.devices)} ({each.answers} under way of {each.answered})"
        for each in copies
    )
    return f"{len(copies)} cop{'ies' if len(copies) > 1 else 'y'}: {', '.join(said)}"


def _health(observed: LastSeen, device: str) -> str:
    """The health of a device in one word; "alive" for a peer that was not asked yet."""
    if device not in observed.peers:
        return "alive"
    peer = observed.peers[device]
    return "no answer" if peer is None else peer.health


def _free_bytes(observed: LastSeen, device: str) -> int | None:
    """Memory of a device that another model may take."""
    peer = observed.peers.get(device)
    return None if peer is None else peer.model_free_now_bytes


def _tiers(peer: PeerInfo | None, model: str, seat: Seat) -> Json | None:
    """Bytes of a shard by where they lie. streamed_bytes: weights that each step reads from disk.
    kv_host_bytes, kv_disk_bytes: keys and values outside the device's memory. kept_bytes,
    kept_disk_bytes: cached prefixes of all models, in memory and on disk."""
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
