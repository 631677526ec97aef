"""The time of a decoded token by parts, actual and predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from edge.host.free_memory import format_size
from edge.partition import Estimate, Plan, Shard
from edge.partition.cost.terms import Kind
from edge.protocol.step_times import PeerTimes

PartKind = Literal["compute", "load", "sums", "sample", "messages"]

_TERMS: dict[PartKind, tuple[Kind, ...]] = {
    "load": ("load", "copy"),
    "sums": ("reduce", "wait"),
    "sample": ("sample",),
    "messages": ("hop", "step"),
}
"""Terms of a prediction, by the part that peers can measure. "compute" is predicted for each
device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPart:
    """One part of a decoded token."""

    kind: PartKind
    label: str
    devices: tuple[str, ...]
    """Ids of the devices, or of the ends of links, that took the time."""
    predicted_s: float
    actual_s: float


def step_parts(
    plan: Plan,
    predicted: Sequence[tuple[float, Estimate]],
    times: Sequence[PeerTimes],
    token_s: float,
) -> list[TokenPart]:
    """The parts of a decoded token, which took `token_s` on average over some replies.

    predicted: estimates of the replies, each with its part of the tokens; the parts add up to 1.
    times: the peers' counters over exactly these replies.

    A stage takes as long as the shard that waits least in its sums: the slowest shard does not wait
    for others, so its time in sums is that of the network. The time that no counter shows is
    "messages": between stages, and to the caller.
    """
    device_s: dict[str, float] = {}
    for weight, estimate in predicted:
        for device, seconds in estimate.device_s:
            device_s[device] = device_s.get(device, 0.0) + weight * seconds

    def part(kind: PartKind, label: str, devices: Sequence[str], actual_s: float) -> TokenPart:
        kinds = _TERMS[kind]
        terms = [
            weight * term.seconds
            for weight, estimate in predicted
            for term in estimate.terms
            if term.kind in kinds
        ]
        return TokenPart(
            kind=kind,
            label=label,
            devices=tuple(devices),
            predicted_s=sum(terms),
            actual_s=actual_s,
        )

    def shard(peer: PeerTimes) -> Shard:
        return plan.stages[peer.stage].slices[peer.rank]

    computed_s: dict[tuple[str, str], float] = {}
    for each in times:  # a device may have several shards
        owner = shard(each).device, each.name
        computed_s[owner] = computed_s.get(owner, 0.0) + each.decode.each.compute_s
    found = [
        TokenPart(
            kind="compute",
            label=f"compute {name}",
            devices=(device,),
            predicted_s=device_s[device],
            actual_s=actual_s,
        )
        for (device, name), actual_s in computed_s.items()
    ]
    slowest = _slowest(times)
    readers = [each for each in times if shard(each).streamed_layers]
    if readers:
        waiting = [each for each in slowest if each in readers]
        load_s = sum(each.decode.each.load_s for each in waiting)
        devices = [shard(each).device for each in waiting or readers]
        found.append(part("load", "layers from disk", devices, load_s))
    summing = max(slowest, key=lambda each: each.decode.reduce_s)
    found.append(
        part(
            "sums",
            "sums",
            [each.device for each in plan.stages[summing.stage].shards],
            sum(each.decode.each.reduce_s for each in slowest),
        )
    )
    sampler = max(times, key=lambda each: (each.stage, -each.rank))  # rank 0 of the last stage
    sample_s = sampler.decode.each.sample_s
    found.append(part("sample", "sample", [shard(sampler).device], sample_s))
    known_s = sample_s + sum(
        each.decode.each.compute_s + each.decode.each.load_s + each.decode.each.reduce_s
        for each in slowest
    )
    found.append(part("messages", "hops and step", plan.devices, max(0.0, token_s - known_s)))
    return found


def reads_in_words(times: Sequence[PeerTimes]) -> list[str]:
    """One line for each peer that read weights while decoding: bytes per token, and the hit rate of
    its expert cache."""
    lines = []
    for each in times:
        token, hits = each.decode.each, each.decode.expert_hits
        if token.read_bytes or hits is not None:
            line = f"{each.name} read {format_size(int(token.read_bytes))} for each token"
            if hits is not None:
                line += f"; {hits:.1%} of the experts it needed were in memory"
            lines.append(f"{line}.")
    return lines


def _slowest(times: Sequence[PeerTimes]) -> list[PeerTimes]:
    """The shard of each stage that waited least in its sums."""
    stages = sorted({each.stage for each in times})
    return [
        min((each for each in times if each.stage == stage), key=lambda each: each.decode.reduce_s)
        for stage in stages
    ]
