"""Facts that a plan is made from: what each peer and each link measured of itself, kept for a day.

A link is looked at each time, with a few messages, and measured again where it has changed: a cable
is plugged in more often than a processor. Peers are not: what tells a device's speed honestly is a
sample of the model, whose loading takes seconds, and a reply that is slower tells it for nothing.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from edge.errors import EdgeError, PeerLostError, ProtocolError
from edge.models.spec import ModelSpec
from edge.planning.link_profile import LinkFacts
from edge.planning.profile_cache import FactsCache, KnownProfile, device_key
from edge.planning.survey import Inquiry, OnNote, PeerClients, ignore_note
from edge.progress import OnProgress, Progress, ignore_progress
from edge.protocol.measurements import MAX_SPAN_S, PeerProfile, Profile, ProfileTogether
from edge.protocol.peer_info import PeerInfo, gather_all
from edge.weights.formats import WeightFormat
from partition import ClusterSpec

_LEAST_SPAN_S = 0.05


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
) -> ClusterSpec:
    """The peers, in this order, with the rates of each for this model and the links between them.

    What is not known, older than a day or of a device that has changed since is measured now, one
    host at a time on each host and one link at a time; `refresh` measures everything. `only_known`
    measures only links that have changed: what is not known has no rates, or no link. A peer that
    cannot be measured has no rates, and `on_note` gets the reason; also for devices whose samples
    disagree, that were busy, or that cannot link to each other.

    Raises PeerLostError naming a peer that goes away meanwhile.
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
            only_known=only_known,
        )
        profiles = await _Rates(inquiry).of(peers)
        links = await LinkFacts(inquiry).between(peers)
    devices = [
        replace(peer.device(), rates=profile.rates if profile is not None else None)
        for peer, profile in ((peer, profiles.get(peer.id)) for peer in peers)
    ]
    return ClusterSpec(devices=tuple(devices), links=links)


def forget_device(peer: PeerInfo, *, cache_root: Path) -> None:
    """Measure this peer anew next time, whatever the model: it ran otherwise than it had said."""
    FactsCache(cache_root / "measured").forget_device(peer)


def forget_link(one: PeerInfo, other: PeerInfo, *, cache_root: Path) -> None:
    """Measure the link between these two anew next time."""
    FactsCache(cache_root / "measured").forget_link(one, other)


class _Rates:
    """The rates of one model's peers: those that are known, and measured those that are not."""

    def __init__(self, inquiry: Inquiry) -> None:
        self._inquiry = inquiry

    async def of(self, peers: Sequence[PeerInfo]) -> dict[str, PeerProfile]:
        """By id; without those that cannot be measured."""
        hosts: dict[str, list[PeerInfo]] = defaultdict(list)
        for peer in peers:
            hosts[peer.host].append(peer)
        found: dict[str, PeerProfile] = {}
        await gather_all(self._host(group, found) for group in hosts.values())
        for peer in peers:
            if peer.id in found and found[peer.id].is_unsteady:
                self._inquiry.on_note(
                    f"{peer.name} is not steady: its samples were {found[peer.id].spread:.0%} "
                    "apart, so predictions for it are rough"
                )
        return found

    async def _host(self, group: Sequence[PeerInfo], found: dict[str, PeerProfile]) -> None:
        """Peers that share a memory: each alone, then all at once. Fills `found`."""
        keys = {peer.id: device_key(peer) for peer in group}
        neighbours = {
            peer.id: tuple(sorted(keys[other.id] for other in group if other is not peer))
            for peer in group
        }
        known = {} if self._inquiry.refresh else self._known(group, neighbours)
        if self._inquiry.only_known or len(known) == len(group):
            found.update(known)
            return
        measured: dict[str, PeerProfile] = {}
        for peer in group:
            profile = await self._alone(peer, hold=len(group) > 1)
            if profile is not None:
                measured[peer.id] = profile
        if len(measured) > 1:
            asked = [peer for peer in group if peer.id in measured]
            measured |= await self._together(asked, measured)
        is_busy = any(profile.busy for profile in measured.values())
        for peer in group:
            if peer.id in measured and not is_busy:
                self._inquiry.cache.keep_profile(
                    peer,
                    self._inquiry.spec,
                    self._inquiry.weight_format,
                    KnownProfile(profile=measured[peer.id], neighbours=neighbours[peer.id]),
                )
        found.update(measured)

    def _known(
        self, group: Sequence[PeerInfo], neighbours: Mapping[str, tuple[str, ...]]
    ) -> dict[str, PeerProfile]:
        found: dict[str, PeerProfile] = {}
        for peer in group:
            known = self._inquiry.cache.profile(
                peer, self._inquiry.spec, self._inquiry.weight_format
            )
            if known is not None and known.neighbours == neighbours[peer.id]:
                found[peer.id] = known.profile
        return found

    async def _alone(self, peer: PeerInfo, *, hold: bool) -> PeerProfile | None:
        """What the peer measures of itself; None, and a note, when it cannot."""
        client = await self._inquiry.clients.of(peer)
        order = Profile(
            model=self._inquiry.spec, weight_format=self._inquiry.weight_format, hold=hold
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
        if profile.busy:
            self._inquiry.on_note(
                f"{peer.name} had {', '.join(profile.busy)} loaded while it was measured: both "
                "may have been slower for these seconds"
            )
        return profile

    async def _together(
        self, peers: Sequence[PeerInfo], alone: Mapping[str, PeerProfile]
    ) -> dict[str, PeerProfile]:
        """The profiles with the rates of each while the others compute, too.

        All begin at once and are at the same length of step at the same time: the spans are long
        enough for the slowest of them to take its turn while the memory serves all.
        """
        count = min(len(alone[peer.id].rates.rows) for peer in peers)
        spans_s = [
            min(
                MAX_SPAN_S,
                max(
                    _LEAST_SPAN_S,
                    *(
                        1.5
                        * len(peers)
                        * profile.sample_bytes
                        * profile.rates.seconds_per_byte[index]
                        for profile in alone.values()
                    ),
                ),
            )
            for index in range(count)
        ]
        shared: dict[str, PeerProfile] = {}

        async def ask(peer: PeerInfo) -> None:
            profile, client = alone[peer.id], await self._inquiry.clients.of(peer)
            seconds = (await client.call(ProfileTogether(spans_s=tuple(spans_s)))).seconds
            if len(seconds) != count:
                raise ProtocolError(
                    f"peer {peer.name} was asked for {count} times, not {len(seconds)}"
                )
            own = profile.rates.seconds_per_byte
            rates = [
                # Company makes nobody faster: what seems so is noise.
                max(each / profile.sample_bytes, own[index])
                for index, each in enumerate(seconds)
            ]
            # A device too slow for the longest step of the others scales the step before.
            rates += [rates[-1] / own[count - 1] * each for each in own[count:]]
            shared[peer.id] = replace(
                profile, rates=replace(profile.rates, shared_seconds_per_byte=tuple(rates))
            )

        await gather_all(ask(peer) for peer in peers)
        return shared
