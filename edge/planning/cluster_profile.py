"""Rates of peers and links, measured by the peers and cached for a day.

Cached links are checked each time with a few messages, and measured again if they have changed:
cables change more often than processors. Peers are not checked, because an honest check would load
a sample of the model for seconds; slow replies show a slower peer at no cost.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from edge.errors import EdgeError, PeerLostError, ProtocolError
from edge.models.spec import ModelSpec
from edge.partition import ClusterSpec, ComputeRates, CrowdSpec, DeviceSpec
from edge.partition.cost.message_times import NO_LINK_S, UNKNOWN_LOCAL_LINK
from edge.partition.plan.rates import between
from edge.planning.link_profile import LinkFacts
from edge.planning.profile_cache import FactsCache
from edge.planning.rehearsal import Trial, counts, rehearse
from edge.planning.survey import Inquiry, OnNote, PeerClients, ignore_note
from edge.progress import OnProgress, Progress, ignore_progress
from edge.protocol.measurements import PeerProfile, Profile
from edge.protocol.peer_info import PeerInfo, gather_all
from edge.weights.formats import WeightFormat

_MOST_ALIKE = 2
"""Peers of one host with the same setup that are measured; the others get the same rates."""


async def measured_cluster(
    peers: Sequence[PeerInfo],
    spec: ModelSpec,
    weight_format: WeightFormat,
    *,
    cache_root: Path,
    on_progress: OnProgress = ignore_progress,
    on_note: OnNote = ignore_note,
    refresh: bool = False,
    only_known: bool = False,
    only_remembered: bool = False,
    only: Collection[str] | None = None,
    on_rough: Callable[[], None] | None = None,
    at_rest: Collection[str] = (),
) -> ClusterSpec:
    """The peers, in this order, with their rates for this model and the links between them.

    Facts that are missing, older than a day, or of a device that changed since are measured now:
    one peer at a time on each host, and one link at a time. A peer that cannot be measured has no
    rates. `on_note` gets the reason, and also devices whose samples disagree, that were busy, or
    that cannot link to each other.

    refresh: measure everything again. only_known: measure only links that have changed; missing
    rates and links stay missing. only_remembered: also do not check links. only: measure only these
    peers (ids) and their links, and no peers together, because others may be busy. on_rough: only
    look at what is missing, which takes a second or two, and call this if anything is. at_rest:
    models that are loaded on the peers and compute nothing meanwhile.

    Raises PeerLostError with the name of a peer that goes away meanwhile.
    """
    cache = FactsCache(cache_root / "measured")
    async with contextlib.AsyncExitStack() as stack:
        inquiry = Inquiry(
            spec=spec,
            weight_format=weight_format,
            cache=cache,
            clients=PeerClients(stack),
            on_progress=on_progress,
            on_note=on_note,
            refresh=refresh,
            only_known=only_known or only_remembered,
            only_remembered=only_remembered,
            only=only,
            on_rough=on_rough,
            at_rest=at_rest,
        )
        profiles = await _Rates(inquiry).of(peers)
        rates = _shared_rates(peers, profiles)
        devices = tuple(replace(peer.device(), rates=rates.get(peer.id)) for peer in peers)
        links = await LinkFacts(inquiry).between(peers)
        cluster = ClusterSpec(devices=devices, links=links)
        is_busy = any(set(profile.busy) - set(at_rest) for profile in profiles.values())
        return await _Contention(inquiry, is_busy=is_busy).measured(peers, cluster)


def forget_device(peer: PeerInfo, *, cache_root: Path) -> None:
    """Forget the measurements of this peer for all models, after it ran slower than they say."""
    FactsCache(cache_root / "measured").forget_device(peer)


def forget_link(one: PeerInfo, other: PeerInfo, *, cache_root: Path) -> None:
    """Forget the measurements of the link between these two."""
    FactsCache(cache_root / "measured").forget_link(one, other)


class _Rates:
    """The rates of peers for one model: cached ones, and new ones where they are missing."""

    def __init__(self, inquiry: Inquiry) -> None:
        self._inquiry = inquiry

    async def of(self, peers: Sequence[PeerInfo]) -> dict[str, PeerProfile]:
        """Profiles by id, without peers that cannot be measured."""
        found: dict[str, PeerProfile] = {}
        await gather_all(self._host(group, found) for group in by_host(peers))
        for peer in peers:
            if peer.id in found and found[peer.id].is_unsteady:
                self._inquiry.on_note(
                    f"the speed of {peer.name} varies: its samples differ by "
                    f"{found[peer.id].spread:.0%}, so predictions for it are rough"
                )
        return found

    async def _host(self, group: Sequence[PeerInfo], found: dict[str, PeerProfile]) -> None:
        """Profile the peers of one machine, one after the other. Fills `found`."""
        inquiry = self._inquiry
        alike: Counter[str] = Counter()
        is_brief = inquiry.on_rough is not None
        for peer in group:
            profile = None
            if alike[peer.identity] == (1 if is_brief else _MOST_ALIKE):
                continue
            facts = peer, inquiry.spec, inquiry.weight_format
            if not inquiry.refresh:
                profile = inquiry.cache.profile(*facts)
                if profile is None and (is_brief or inquiry.only_remembered):
                    profile = inquiry.cache.profile(*facts, of="look")
                    if profile is not None and inquiry.on_rough is not None:
                        inquiry.on_rough()
            if profile is None and inquiry.may_measure(peer):
                profile = await self._alone(peer)
                if inquiry.on_rough is not None:
                    inquiry.on_rough()
                if profile is not None and not set(profile.busy) - set(inquiry.at_rest):
                    inquiry.cache.keep_profile(*facts, profile, of="look" if is_brief else "device")
            if profile is not None:
                found[peer.id] = profile
                alike[peer.identity] += 1

    async def _alone(self, peer: PeerInfo) -> PeerProfile | None:
        """The profile that the peer measures of itself; None, with a note, when it cannot."""
        client = await self._inquiry.clients.of(peer)
        order = Profile(
            model=self._inquiry.spec,
            weight_format=self._inquiry.weight_format,
            is_brief=self._inquiry.on_rough is not None,
        )
        self._inquiry.on_progress(Progress(phase="measure", peer=peer.name, done=0, total=1))
        try:
            profile = await client.call(order)
        except (PeerLostError, ProtocolError):
            raise
        except EdgeError as error:
            self._inquiry.on_note(f"{peer.name} was not measured: {error}")
            return None
        finally:
            self._inquiry.on_progress(Progress(phase="measure", peer=peer.name, done=1, total=1))
        if busy := set(profile.busy) - set(self._inquiry.at_rest):
            self._inquiry.on_note(
                f"{peer.name} had {', '.join(sorted(busy))} loaded while it was measured, "
                "so answers and the measurement may have slowed each other"
            )
        return profile


class _Contention:
    """The contention between peers of one host: cached, or measured by rehearsals."""

    def __init__(self, inquiry: Inquiry, *, is_busy: bool) -> None:
        self._inquiry = inquiry
        self._is_busy = is_busy
        """Replies of others were under way, so these measurements are not cached."""

    async def measured(self, peers: Sequence[PeerInfo], cluster: ClusterSpec) -> ClusterSpec:
        """The cluster with the contention of all hosts, measured one host after the other."""
        crowds: list[CrowdSpec] = []
        for group in by_host(peers):
            measured = [peer for peer in group if cluster.device(peer.id).rates is not None]
            if len(measured) > 1:
                crowds += await self._host(measured, cluster)
        return _with_contention(cluster, crowds)

    async def _host(self, group: Sequence[PeerInfo], cluster: ClusterSpec) -> Sequence[CrowdSpec]:
        inquiry = self._inquiry
        if not inquiry.refresh:
            known = inquiry.cache.crowds(group, inquiry.spec, inquiry.weight_format)
            if known is not None or inquiry.only_known or inquiry.only is not None:
                return known or ()
        if inquiry.on_rough is not None:
            inquiry.on_rough()
            return [_assumed(group)]
        fastest = sorted(group, key=lambda peer: _token_s_per_byte(cluster.device(peer.id)))
        trials: list[Trial] = []
        for count in counts(len(group)):
            trial = await rehearse(inquiry, fastest[:count], cluster)
            if trial is None:
                break
            trials.append(trial)
        crowds = self._crowds(trials, cluster)
        if not self._is_busy:
            inquiry.cache.keep_crowds(group, inquiry.spec, inquiry.weight_format, crowds)
        return crowds

    def _crowds(self, trials: Sequence[Trial], cluster: ClusterSpec) -> list[CrowdSpec]:
        """The contention that the trials show, at the median pace of rates and trials.

        Each trial is compared at its own pace, because it ran in turn with one of the devices
        alone.
        """
        paces = [(1.0, 1.0), *(trial.alone for trial in trials if trial.alone is not None)]
        token, first = (median(each) for each in zip(*paces, strict=True))
        if not trials:
            return []
        host = cluster.device(trials[0].plan.devices[0]).host
        pace, link = (token, first), _median_link(cluster, host)
        return [
            trial.crowd(_at_pace(cluster, host, trial.rows, trial.alone or pace), pace, link)
            for trial in trials
        ]


def _assumed(group: Sequence[PeerInfo]) -> CrowdSpec:
    """The contention of a host's peers that were not measured together: as of two peers of one core
    each, which share its memory (W in int4, tensor parallel: 1.28 times as fast as one)."""
    return CrowdSpec(
        host=group[0].host,
        count=len(group),
        rows=(1, 64),
        sum_s=(50e-6, 200e-6),
        slower=(1.5, 1.2),
        pace=(1.0, 1.0),
        link=UNKNOWN_LOCAL_LINK,
    )


def _with_contention(cluster: ClusterSpec, crowds: Sequence[CrowdSpec]) -> ClusterSpec:
    """The cluster with the contention of its hosts, and rates at the pace of the trials."""
    largest = {each.host: each for each in sorted(crowds, key=lambda each: each.count)}
    for host, crowd in largest.items():
        cluster = _at_pace(cluster, host, crowd.rows, crowd.pace)

    def device(known: DeviceSpec) -> DeviceSpec:
        if known.host not in largest or known.rates is None:
            return known
        crowd, rates = largest[known.host], known.rates
        # Other peers make no device faster, so values below 1 are noise.
        shared = tuple(
            each * max(1.0, between(crowd.rows, crowd.slower, rows))
            for rows, each in zip(rates.rows, rates.seconds_per_byte, strict=True)
        )
        return replace(known, rates=replace(rates, shared_seconds_per_byte=shared))

    return replace(cluster, crowds=tuple(crowds), devices=tuple(map(device, cluster.devices)))


def _median_link(cluster: ClusterSpec, host: str) -> tuple[float, float]:
    """The median (latency in s, bytes per s) of the host's links that work."""
    own = {device.id for device in cluster.devices if device.host == host}
    links = [
        link
        for link in cluster.links
        if {link.source, link.target} <= own and link.latency_s < NO_LINK_S
    ]
    if not links:
        return UNKNOWN_LOCAL_LINK
    return median(link.latency_s for link in links), median(link.bytes_per_s for link in links)


def _at_pace(
    cluster: ClusterSpec, host: str, rows: Sequence[int], pace: Sequence[float]
) -> ClusterSpec:
    """The cluster with this pace for the fastest devices of the host, one of which was tried
    alone."""
    measured = [each.rates for each in cluster.devices if each.host == host and each.rates]
    fastest = min(measured, key=lambda rates: rates.seconds_per_byte[0])

    def device(known: DeviceSpec) -> DeviceSpec:
        if known.host != host or known.rates != fastest:
            return known
        return replace(known, rates=fastest.at_pace(rows, pace))

    return replace(cluster, devices=tuple(map(device, cluster.devices)))


def _shared_rates(
    peers: Sequence[PeerInfo], profiles: Mapping[str, PeerProfile]
) -> dict[str, ComputeRates]:
    """Rates by id. Peers of one host with the same setup get the same rates.

    Their speeds are equal. Measurements taken one after the other differ from minute to minute, and
    would give unequal shares.
    """
    alike: dict[tuple[str, str], list[ComputeRates]] = defaultdict(list)
    for peer in peers:
        if peer.id in profiles:
            alike[peer.host, peer.identity].append(profiles[peer.id].rates)
    rates: dict[str, ComputeRates] = {}
    for peer in peers:
        if known := alike[peer.host, peer.identity]:
            same = [each for each in known if each.rows == known[0].rows]
            rates[peer.id] = ComputeRates.median(same)
    return rates


def set_up_like(devices: Sequence[str], peers: Sequence[PeerInfo]) -> list[PeerInfo]:
    """These peers (by id), and the peers of their hosts with the same setup, which share their
    measurements."""
    kinds = {(peer.host, peer.identity) for peer in peers if peer.id in devices}
    return [peer for peer in peers if (peer.host, peer.identity) in kinds]


def by_host(peers: Sequence[PeerInfo]) -> list[list[PeerInfo]]:
    """Peers that share a machine, in the order given."""
    hosts: dict[str, list[PeerInfo]] = defaultdict(list)
    for peer in peers:
        hosts[peer.host].append(peer)
    return list(hosts.values())


def _token_s_per_byte(device: DeviceSpec) -> float:
    assert device.rates is not None
    return device.rates.seconds_per_byte[0]
