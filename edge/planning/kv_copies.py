"""Copies of keys and values that a coordinator has its peers send: which, and their cost. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from edge.partition import Workload, memory_use
from edge.planning.load_options import Standby
from edge.planning.proposal import Proposal
from edge.protocol.assignment import Copies

MOST_KEPT_KV_BYTES: Mapping[Copies, int] = {"none": 0, "answers": 128 << 20, "all": 1 << 30}
"""Copies of keys and values of all requests; of what comes when there are as many, none is kept."""

FAST_BYTES_PER_S = 100e6
"""A copy takes as much as several hidden states of its token do: nothing to notice on a link like
this, a part of each token's time on a slow one."""


def kv_copies(standby: Standby, proposal: Proposal, *, here: str) -> Copies:
    """With "auto", of answers, where what is known of the way to here is fast. None of a model with
    states: keys and values say nothing without those.

    The way from a peer to its coordinator is not measured. It is fast on one machine (`here`: its
    host id); else the links of the plan's devices tell, which lie in the same network.
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
    """Cost of a plan's copies, for the device that asks; in the form in which shards keep them."""

    copies: Copies
    token_bytes: Mapping[str, int]
    """Bytes of each token that is copied, by the device that sends it."""
    bytes_per_s: Mapping[str, float] | None
    """That come from each device while answers are made at the predicted speed; None where that is
    not known."""

    @property
    def kept_tokens(self) -> int:
        """Tokens of all requests under way that there is memory for."""
        return MOST_KEPT_KV_BYTES[self.copies] // max(1, sum(self.token_bytes.values()))


def copies_cost(proposal: Proposal, standby: Standby, *, here: str) -> CopiesCost | None:
    """Every shard sends all that it keeps of a token, once. None where nothing is copied."""
    copies = kv_copies(standby, proposal, here=here)
    if copies == "none":
        return None
    one = Workload(prompt_tokens=1, output_tokens=0)
    uses = memory_use(proposal.plan, proposal.model, one)
    token_bytes = {device: use.kv_bytes for device, use in uses.items()}
    rates = None
    if (predicted := proposal.choice.predicted) is not None:
        rates = {device: each * predicted.tokens_per_s for device, each in token_bytes.items()}
    return CopiesCost(copies=copies, token_bytes=token_bytes, bytes_per_s=rates)
