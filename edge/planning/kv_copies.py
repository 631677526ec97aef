"""Of what a coordinator has its peers send copies of the keys and values. Pure."""

from __future__ import annotations

from edge.partition import ClusterSpec, Plan
from edge.planning.load_options import Standby
from edge.protocol.assignment import Copies

FAST_BYTES_PER_S = 100e6
"""A copy takes as much as several hidden states of its token do: nothing to notice on a link like
this, a part of each token's time on a slow one."""


def kv_copies(standby: Standby, plan: Plan, cluster: ClusterSpec, *, here: str) -> Copies:
    """With "auto", of answers, where what is known of the way to here is fast.

    The way from a peer to its coordinator is not measured. It is fast on one machine (`here`: its
    host id); else the links of the plan's devices tell, which lie in the same network.
    """
    if standby != "auto":
        return "all" if standby == "kv" else "none"
    planned = set(plan.devices)
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
