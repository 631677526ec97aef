"""Copies of a model: which devices hold one, and whether they answer more than one plan does."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from edge import partition
from edge.errors import CapacityError, PlanError, RequestError
from edge.partition import ClusterSpec, DeviceSpec
from edge.planning.load_options import MOST_COPIES, LoadOptions
from edge.planning.measured_proposal import measured_proposal
from edge.planning.proposal import Proposal
from edge.progress import ignore_progress
from edge.protocol.peer_info import PeerInfo
from edge.weights.checkpoint import Checkpoint

LEAST_GAIN = 1.1
"""Least ratio of tokens per second for which a model changes between one plan and copies, in both
directions: predictions err by as much."""

WINDOW = 10
"""Looks at the load, a second apart, that make a window. Two windows must ask for a change."""

Propose = Callable[[Sequence[PeerInfo], LoadOptions], Awaitable[Proposal]]
"""The proposal for a load on these peers."""

Way = Literal["one", "copies"]
"""One plan over the devices, or a copy on each of several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiesForecast:
    """The predicted tokens per second of all requests together: by one plan, and by copies."""

    requests: int
    """Requests at once."""
    one_tokens_per_s: float
    copies_tokens_per_s: float
    devices: tuple[tuple[str, ...], ...]
    """Names of the devices of each copy."""

    def way(self, now: Way = "one") -> Way:
        """What to run. now: what runs; it stays unless the other is faster by LEAST_GAIN."""
        one, copies = self.one_tokens_per_s, self.copies_tokens_per_s
        if now == "one":
            return "copies" if copies >= LEAST_GAIN * one else "one"
        return "one" if one >= LEAST_GAIN * copies else "copies"

    def in_words(self, now: Way = "one") -> str:
        """Both predictions and what follows, without a point at the end. now: what runs."""
        where = "; ".join(" and ".join(each) for each in self.devices)
        does = "runs the copies" if self.way(now) == "copies" else "keeps one plan"
        return (
            f"at {self.requests} requests at once, {len(self.devices)} copies ({where}) make "
            f"{self.copies_tokens_per_s:.3g} tok/s together, and one plan "
            f"{self.one_tokens_per_s:.3g}: copies auto {does}"
        )


class LoadSeen:
    """The requests at once, by looks at equal distances. Pure."""

    def __init__(self, window: int = WINDOW) -> None:
        """window: looks whose mean is the load."""
        self._window = window
        self._looks: list[int] = []

    def look(self, requests: int) -> int | None:
        """Count a look. At the end of a window: the mean of its looks with requests, rounded up, or
        0 if there were none; else None."""
        self._looks.append(requests)
        if len(self._looks) < self._window:
            return None
        busy = [each for each in self._looks if each]
        self._looks.clear()
        return math.ceil(sum(busy) / len(busy)) if busy else 0


async def with_copies(
    checkpoint: Checkpoint,
    one: Proposal,
    peers: Sequence[PeerInfo],
    options: LoadOptions,
    changes: Sequence[str],
) -> Proposal:
    """The proposal of one plan with a note on what copies would do for `concurrency` requests at
    once, where the model fits whole on several devices. No note for an assumed cluster."""
    if options.concurrency < 2 or len(peers) < 2 or options.plan != "auto" or changes:
        return one
    propose = partial(measured_proposal, checkpoint, measure="nothing", on_progress=ignore_progress)
    most = options.copies if isinstance(options.copies, int) and options.copies > 1 else MOST_COPIES
    plans = await copy_proposals(propose, peers, options, most=most, known=one.cluster)
    predicted = forecast_copies(one, plans, options.concurrency)
    return one if predicted is None else replace(one, notes=(*one.notes, predicted.in_words()))


def of_a_copy(options: LoadOptions, context_tokens: int | None = None) -> LoadOptions:
    """The options of one of several copies: whole in memory, on its own devices. context_tokens:
    None: as in `options`."""
    context_tokens = context_tokens or options.context_tokens
    return replace(options, copies=None, stream="off", replan="off", context_tokens=context_tokens)


async def copy_proposals(
    propose: Propose,
    peers: Sequence[PeerInfo],
    options: LoadOptions,
    *,
    most: int,
    known: ClusterSpec,
) -> list[Proposal]:
    """Plans of copies on different devices, the fastest first; at most so many, none if the model
    fits nowhere. All keep the same context.

    Devices that hold the whole model get a copy each. Where these are too few, the others have one
    together, and those that it leaves out another one. known: has the rates of devices that are not
    measured alone.
    """
    options = of_a_copy(options)
    found: list[Proposal] = []
    rest: list[PeerInfo] = []
    for peer in peers:
        proposal = await _proposed(propose, [peer], options)
        if proposal is None:
            rest.append(peer)
        else:
            found.append(with_rates(proposal, known))
    found.sort(key=_seconds)
    while len(found) < most and rest:
        if (proposal := await _proposed(propose, rest, options)) is None:
            break
        found.append(proposal)
        rest = [peer for peer in rest if peer.id not in proposal.plan.devices]
    found = found[:most]
    context = min((each.context_tokens for each in found), default=0)
    same = [await _with_context(propose, each, peers, options, context) for each in found]
    return [with_rates(each, known) for each in same]


def with_rates(proposal: Proposal, known: ClusterSpec) -> Proposal:
    """The proposal with the rates of `known`, where it has some, and a prediction by them."""
    rates = {device.id: device.rates for device in known.devices}
    devices = tuple(
        replace(each, rates=rates.get(each.id) or each.rates) for each in proposal.cluster.devices
    )
    cluster = replace(proposal.cluster, devices=devices)
    if any(cluster.device(id).rates is None for id in proposal.plan.devices):
        return proposal
    predicted = partition.estimate(
        proposal.plan,
        proposal.model,
        cluster,
        proposal.workload,
        chunk_tokens=proposal.limits.chunk_tokens,
    )
    choice = replace(proposal.choice, predicted=predicted)
    return replace(proposal, cluster=cluster, choice=choice)


async def _with_context(
    propose: Propose,
    proposal: Proposal,
    peers: Sequence[PeerInfo],
    options: LoadOptions,
    context_tokens: int,
) -> Proposal:
    if proposal.context_tokens == context_tokens:
        return proposal
    own = [peer for peer in peers if peer.id in proposal.plan.devices]
    return await propose(own, replace(options, context_tokens=context_tokens))


async def _proposed(
    propose: Propose, peers: Sequence[PeerInfo], options: LoadOptions
) -> Proposal | None:
    try:
        return await propose(peers, options)
    except (CapacityError, PlanError, RequestError):  # the last: no kernels for the model
        return None


def _seconds(proposal: Proposal) -> float:
    predicted = proposal.choice.predicted
    return 0.0 if predicted is None else predicted.total_s(proposal.workload)


def forecast_copies(
    one: Proposal, copies: Sequence[Proposal], requests: int
) -> CopiesForecast | None:
    """Predictions for so many requests at once; None for fewer than two copies, and where a device
    was not measured."""
    if len(copies) < 2 or any(each.choice.predicted is None for each in (one, *copies)):
        return None
    return CopiesForecast(
        requests=requests,
        one_tokens_per_s=tokens_per_s(one, one.cluster, requests),
        copies_tokens_per_s=together_tokens_per_s(copies, requests),
        devices=tuple(
            tuple(each.cluster.device(id).name for id in each.plan.devices) for each in copies
        ),
    )


def tokens_per_s(proposal: Proposal, cluster: ClusterSpec, requests: int) -> float:
    """Tokens of answers per second while so many requests of the proposal's workload are always
    under way: their prompts are computed one after the other, their answers side by side."""
    workload = replace(
        proposal.workload,
        concurrency=requests,
        reserved_tokens=proposal.workload.cached_tokens,
    )
    chunk_tokens = proposal.limits.chunk_tokens
    predicted = partition.estimate(
        proposal.plan, proposal.model, cluster, workload, chunk_tokens=chunk_tokens
    )
    tokens = max(1, workload.output_tokens)
    return requests * tokens / (requests * predicted.first_token_s + tokens * predicted.token_s)


def together_tokens_per_s(copies: Sequence[Proposal], requests: int) -> float:
    """The same for copies that share the requests by their speed. Of copies on one host, each
    computes as slowly as beside the others."""
    clusters = [_crowded(each, copies) for each in copies]
    alone = [tokens_per_s(each, cluster, 1) for each, cluster in zip(copies, clusters, strict=True)]
    counts = [0] * len(copies)
    for _ in range(requests):
        least = min(range(len(copies)), key=lambda index: (counts[index] + 1) / alone[index])
        counts[least] += 1
    return sum(
        tokens_per_s(each, cluster, count)
        for each, cluster, count in zip(copies, clusters, counts, strict=True)
        if count
    )


def _crowded(proposal: Proposal, copies: Sequence[Proposal]) -> ClusterSpec:
    """The cluster of a proposal with devices as slow as they are beside other copies."""
    others = {
        each.cluster.device(id).host
        for each in copies
        if each is not proposal
        for id in each.plan.devices
    }
    devices = tuple(
        _slowed(device) if device.host and device.host in others else device
        for device in proposal.cluster.devices
    )
    return replace(proposal.cluster, devices=devices)


def _slowed(device: DeviceSpec) -> DeviceSpec:
    """The device at its pace beside others of its host, which share its memory and cores."""
    rates = device.rates
    if rates is None:
        return device
    together = zip(rates.shared_seconds_per_byte, rates.seconds_per_byte, strict=True)
    slower = max(shared / alone for shared, alone in together)
    return replace(device, rates=rates.slowed_by(slower))
