"""KV cache copies that peers send to the coordinator for failover: which, and their cost. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from edge.partition import LayerFacts, Workload, memory_use
from edge.planning.load_options import Standby
from edge.planning.proposal import Proposal
from edge.protocol.assignment import Copies

MOST_KEPT_KV_BYTES: Mapping[Copies, int] = {"none": 0, "answers": 128 << 20, "all": 1 << 30}
"""Most bytes of copies of all requests together; further ones are dropped."""

FAST_BYTES_PER_S = 100e6
"""A link of this rate sends copies in no noticeable time. A copy has the bytes of several hidden
states of its token; a slow link spends a part of each token's time on it."""


def kv_copies(standby: Standby, proposal: Proposal, *, here: str) -> Copies:
    """The copies to send. With "auto", those of answers where the links are fast. None for a model
    with recurrent states: keys and values are of no use without those.

    The link from a peer to its coordinator is not measured. It is fast on one machine (`here`: its
    host id). Else the links between the plan's devices stand for it, because they are in the same
    network.
    """
    if any(kind.state_bytes for kind in proposal.model.kinds):
        return "none"
    if standby != "auto":
        return "all" if standby == "kv" else "none"
    cluster, planned = proposal.cluster, set(proposal.plan.devices)
    elsewhere = {id for id in planned if cluster.device(id).host != here}
    if not elsewhere:
        return "answers"
    measured = [link for link in cluster.links if {link.source, link.target} <= planned]
    linked = {end for link in measured for end in (link.source, link.target)}
    is_fast = elsewhere <= linked and all(
        link.bytes_per_s >= FAST_BYTES_PER_S
        for link in measured
        if {link.source, link.target} & elsewhere
    )
    return "answers" if is_fast else "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiesCost:
    """Cost of a plan's copies for the coordinator's device, in the shards' KV format."""

    copies: Copies
    token_bytes: Mapping[str, int]
    """Bytes of a copied token, by sending device."""
    bytes_per_s: Mapping[str, float] | None
    """Bytes per second from each device at the predicted speed; None without a prediction."""

    @property
    def kept_tokens(self) -> int:
        """Most tokens of all requests that copies are kept of."""
        return MOST_KEPT_KV_BYTES[self.copies] // max(1, sum(self.token_bytes.values()))


def copies_cost(proposal: Proposal, standby: Standby, *, here: str) -> CopiesCost | None:
    """The cost where every shard sends its cache of a token once. None without copies."""
    copies = kv_copies(standby, proposal, here=here)
    if copies == "none":
        return None
    one = Workload(prompt_tokens=1, output_tokens=0)
    model = replace(proposal.model, kinds=tuple(map(_of_all_tokens, proposal.model.kinds)))
    uses = memory_use(proposal.plan, model, one)
    token_bytes = {device: use.kv_bytes for device, use in uses.items()}
    rates = None
    if (predicted := proposal.choice.predicted) is not None:
        rates = {device: each * predicted.tokens_per_s for device, each in token_bytes.items()}
    return CopiesCost(copies=copies, token_bytes=token_bytes, bytes_per_s=rates)


def _of_all_tokens(kind: LayerFacts) -> LayerFacts:
    """The kind as if it kept all tokens, of each of which a copy is sent."""
    if kind.window_tokens is None:
        return kind
    token_bytes = kind.window_bytes // kind.window_tokens
    return replace(kind, kv_bytes_per_token=token_bytes, window_bytes=0, window_tokens=None)
