"""Where a token's time went, part by part, next to what was predicted of each part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edge.host.free_memory import format_size
from edge.partition import Estimate, Plan
from edge.protocol.step_times import PeerTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of a decoded token."""

    part: str
    predicted_s: float
    actual_s: float


def step_parts(
    plan: Plan, predicted: Estimate, times: Sequence[PeerTimes], token_s: float
) -> list[Part]:
    """Parts by the peers' counters over some replies, of which a decoded token took `token_s`.

    In each stage the shard counts that computed longest. What the counters do not tell is the last
    part before the whole: handing on from stage to stage, and to the caller.
    """
    predicted_s = dict(predicted.device_s)
    found = [
        Part(
            part=f"compute {each.name}",
            predicted_s=predicted_s[plan.stages[each.stage].shards[each.rank].device],
            actual_s=each.decode.each.compute_s,
        )
        for each in times
    ]
    slowest = _slowest(times)
    load_s = sum(each.decode.each.load_s for each in slowest)
    if any(shard.streamed_layers for stage in plan.stages for shard in stage.slices):
        known_s = _sum(predicted, "load", "copy")
        found.append(Part(part="layers from disk", predicted_s=known_s, actual_s=load_s))
    reduce_s = sum(each.decode.each.reduce_s for each in slowest)
    sampler = max(times, key=lambda each: (each.stage, -each.rank))  # rank 0 of the last stage
    sample_s = sampler.decode.each.sample_s
    compute_s = sum(each.decode.each.compute_s for each in slowest)
    rest_s = max(0.0, token_s - compute_s - load_s - reduce_s - sample_s)
    return [
        *found,
        Part(part="sums", predicted_s=_sum(predicted, "reduce", "wait"), actual_s=reduce_s),
        Part(part="sample", predicted_s=_sum(predicted, "sample"), actual_s=sample_s),
        Part(part="hops and step", predicted_s=_sum(predicted, "hop", "step"), actual_s=rest_s),
        Part(part="token", predicted_s=predicted.token_s, actual_s=token_s),
    ]


def reads_in_words(times: Sequence[PeerTimes]) -> list[str]:
    """A line for each peer that read weights while it decoded: how much, and the part of the
    experts it needed that it had."""
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


def _sum(predicted: Estimate, *kinds: str) -> float:
    return sum(term.seconds for term in predicted.terms if term.kind in kinds)
