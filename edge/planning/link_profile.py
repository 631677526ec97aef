"""The speed of messages between each two peers of a cluster, measured by the peers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import TypeVar

from edge.errors import EdgeError, PeerLostError, ProtocolError
from edge.partition import LinkSpec
from edge.partition.cost.message_times import NO_LINK_S
from edge.planning.load_options import CHUNK_TOKENS
from edge.planning.survey import Inquiry
from edge.progress import Progress
from edge.protocol.link_probe import times_of
from edge.protocol.measurements import (
    MAX_MESSAGE_BYTES,
    Glance,
    LinkQuestion,
    LinkTimes,
    Probe,
)
from edge.protocol.peer_frames import Describe
from edge.protocol.peer_info import PeerInfo, places

_TRIES = 2
"""Probes of a link until its two peers count as unable to link to each other."""

Question = TypeVar("Question", bound=LinkQuestion)


class LinkFacts:
    """The links between peers: cached, or measured where they are missing or have changed."""

    def __init__(self, inquiry: Inquiry) -> None:
        self._inquiry = inquiry
        self._hidden_bytes = 4 * inquiry.spec.hidden_size

    async def between(self, peers: Sequence[PeerInfo]) -> tuple[LinkSpec, ...]:
        """The links of each pair in both directions. Measures one at a time, because measurements
        at the same time would slow each other.

        Cached links are checked, and measured again if they have changed.
        """
        found: dict[tuple[str, str], LinkTimes | None] = {}
        unknown: list[tuple[PeerInfo, PeerInfo]] = []
        for source, target in combinations(peers, 2):
            inquiry = self._inquiry
            times = None if inquiry.refresh else inquiry.cache.link(source, target)
            if times is not None and (
                inquiry.takes_as_known(source, target)
                or (inquiry.on_rough is not None and source.host == target.host)
                or not await self._has_changed(source, target, times)
            ):
                found[source.id, target.id] = times
            elif times is not None or inquiry.may_measure(source, target):
                unknown.append((source, target))
        if self._inquiry.on_rough is not None:
            return tuple(await self._looked_at(found, unknown))
        for done, (source, target) in enumerate(unknown):
            self._inquiry.on_progress(
                Progress(phase="measure", peer="", done=done, total=len(unknown))
            )
            times = await self._link(source, target)
            if times is not None:
                self._inquiry.cache.keep_link(source, target, times)
            found[source.id, target.id] = times
        if unknown:
            total = len(unknown)
            self._inquiry.on_progress(Progress(phase="measure", peer="", done=total, total=total))
        names = {peer.id: peer.name for peer in peers}
        for (one, other), times in found.items():
            if times is not None and times.is_unsteady:
                self._inquiry.on_note(
                    f"the speed of the link between {names[one]} and {names[other]} varies: "
                    "messages are lost or delayed, so predictions for it are rough; a cable would "
                    "help"
                )
        return tuple(spec for ends, times in found.items() for spec in _both_ways(*ends, times))

    async def _looked_at(
        self,
        known: Mapping[tuple[str, str], LinkTimes | None],
        unknown: Sequence[tuple[PeerInfo, PeerInfo]],
    ) -> list[LinkSpec]:
        """The known links, and those of different hosts by a short look. Of others nothing is said,
        so that their times are assumed, unless there is no link."""
        links = [spec for ends, times in known.items() for spec in _both_ways(*ends, times)]
        for source, target in unknown:
            assert self._inquiry.on_rough is not None
            self._inquiry.on_rough()
            client = await self._inquiry.clients.of(source)
            try:
                seen = await client.call(self._question(Glance, source, target))
            except (PeerLostError, ProtocolError):
                raise
            except EdgeError:
                links += _both_ways(source.id, target.id, await self._link(source, target))
                continue
            if source.host == target.host:
                continue  # its times are assumed; it was looked at because it may not be there
            links += _both_ways(
                source.id,
                target.id,
                times_of(seen, small_bytes=min(self._hidden_bytes, MAX_MESSAGE_BYTES)),
            )
        return links

    async def _has_changed(self, source: PeerInfo, target: PeerInfo, known: LinkTimes) -> bool:
        """Whether a few messages show another speed than the cached one."""
        try:
            client = await self._inquiry.clients.of(source)
            now = await client.call(self._question(Glance, source, target))
        except (PeerLostError, ProtocolError):
            raise
        except EdgeError:
            return True  # measuring the link reports the error
        return known.differs_from(now)

    async def _link(self, source: PeerInfo, target: PeerInfo) -> LinkTimes | None:
        """The measured link; None, with a note, when the two cannot link to each other though both
        answer. A second try, once the target has answered, is for a device at full load, which may
        be late for the first."""
        client = await self._inquiry.clients.of(source)
        failure: EdgeError | None = None
        for _ in range(_TRIES):
            try:
                return await client.call(self._question(Probe, source, target))
            except (PeerLostError, ProtocolError):
                raise
            except EdgeError as error:
                failure = error
            # Raises PeerLostError with its name if the other end is gone.
            await (await self._inquiry.clients.of(target)).call(Describe())
        self._inquiry.on_note(f"{source.name} and {target.name} cannot share a model: {failure}")
        return None

    def _question(self, kind: type[Question], source: PeerInfo, target: PeerInfo) -> Question:
        return kind(
            place=places({(0, 0): source, (0, 1): target})[0, 1],
            small_bytes=min(self._hidden_bytes, MAX_MESSAGE_BYTES),
            large_bytes=min(self._hidden_bytes * CHUNK_TOKENS, MAX_MESSAGE_BYTES),
        )


def _both_ways(source: str, target: str, times: LinkTimes | None) -> tuple[LinkSpec, LinkSpec]:
    there = back = (NO_LINK_S, 1.0)
    if times is not None:
        there = (times.latency_s, times.there_bytes_per_s)
        back = (times.latency_s, times.back_bytes_per_s)
    return (
        LinkSpec(source=source, target=target, latency_s=there[0], bytes_per_s=there[1]),
        LinkSpec(source=target, target=source, latency_s=back[0], bytes_per_s=back[1]),
    )
