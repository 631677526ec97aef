"""The peers that have kernels for every operator of a model."""

from __future__ import annotations

from collections.abc import Sequence

from edge.errors import RequestError
from edge.models.spec import ModelSpec
from edge.partition import Plan
from edge.protocol.peer_info import PeerInfo

_REMEDY = "start it with --backend ort, so that its CPU computes"


def able_peers(peers: Sequence[PeerInfo], spec: ModelSpec) -> tuple[list[PeerInfo], list[str]]:
    """The peers that can compute the model, and a sentence for each other peer."""
    able, sentences = [], []
    for peer in peers:
        if peer.lacking(spec.needs):
            sentences.append(f"{peer.name} is not used: {_lacking(peer, spec)}; {_REMEDY}")
        else:
            able.append(peer)
    return able, sentences


def some_able_peers(
    peers: Sequence[PeerInfo], spec: ModelSpec, plan: object
) -> tuple[list[PeerInfo], list[str]]:
    """Like `able_peers`. Raises RequestError where no peer can compute the model, or where a plan
    by hand uses one that cannot."""
    able, sentences = able_peers(peers, spec)
    if sentences and not able:
        raise RequestError(f"no peer can compute this model: {'; '.join(sentences)}")
    if isinstance(plan, Plan):
        known = {name for peer in able for name in (peer.id, peer.name)}
        for peer in peers:
            if {peer.id, peer.name} & set(plan.devices) - known:
                raise RequestError(
                    f"the plan by hand gives layers to {peer.name}: {_lacking(peer, spec)}",
                    remedy=_REMEDY,
                )
    return able, sentences


def _lacking(peer: PeerInfo, spec: ModelSpec) -> str:
    missing = ", ".join(peer.lacking(spec.needs))
    return f"its back end {peer.backend} has no kernel for {missing}, which this model has"
