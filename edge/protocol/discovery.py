"""From "who is there?" to peers that answer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Collection,
    Iterable,
    Sequence,
)
from dataclasses import dataclass
from functools import partial

from edge import transport
from edge.errors import EdgeError, NetworkError, PeerError
from edge.membership.presence import Presences
from edge.protocol.announced_peers import ASKED_WITHIN_S, MOST_AT_ONCE, first_answer
from edge.protocol.key_rotation_push import push_key_rotation
from edge.protocol.peer_info import PeerInfo, describe_peer, each_once, expulsion
from edge.protocol.silent_peers import is_silence
from edge.transport import (
    Credentials,
    Discovery,
    PeerFound,
    PeerGone,
    PeerRecord,
    is_link_local,
    parse_address,
)

_log = logging.getLogger(__name__)

SETTLE_S = 1.0
"""Once one peer is found, how long to go on listening for others: answers to one question arrive
within a second."""

MISSING_S = 2.0
"""How long to go on after that for paired devices that have not answered. A device that answered a
question of another one less than a second before is silent at first (RFC 6762, section 6). The
second question follows the first by a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One look at who is there."""

    peers: list[PeerInfo]
    """That answer, each once, by name."""
    silent: frozenset[str]
    """Addresses that are announced, or were given, where nobody said anything."""


async def browse(
    discovery: Discovery, *, timeout_s: float, at_least: int = 1, settle_s: float = SETTLE_S
) -> tuple[PeerRecord, ...]:
    """Peers announced within `timeout_s`; ends early when `at_least` of them are there and no new
    one came for `settle_s`."""
    found: dict[str, PeerRecord] = {}
    loop = asyncio.get_running_loop()
    end_s = loop.time() + timeout_s
    events = discovery.watch()
    try:
        async with asyncio.timeout_at(end_s) as deadline:
            async for event in events:
                if isinstance(event, PeerFound):
                    found[event.record.id] = event.record
                elif isinstance(event, PeerGone):
                    found.pop(event.id, None)
                if len(found) >= at_least:
                    deadline.reschedule(min(end_s, loop.time() + settle_s))
    except TimeoutError:
        pass
    return tuple(found[id] for id in sorted(found, key=lambda id: (found[id].name, id)))


async def find_peers(
    cluster: str,
    credentials: Credentials | None,
    *,
    timeout_s: float,
    interfaces: Sequence[str] | None,
    at_least: int = 1,
    expected: Collection[str] = (),
    presences: Presences | None = None,
) -> tuple[list[PeerInfo], list[EdgeError]]:
    """Peers of the cluster that can be reached, each once, by name; and why others cannot be, which
    are announced. expected: ids of devices for which it looks MISSING_S longer. presences: what was
    seen before, which is told of what is seen.

    Raises NetworkError saying what was tried, when there is none.
    """
    async with _looking(cluster, credentials, interfaces) as discovery:
        records = await browse(discovery, timeout_s=timeout_s, at_least=at_least)
        answers = await _reach_all(records, credentials)
        if records:
            answers += await _reach_missing(discovery, credentials, records, answers, expected)
        tried = discovery.describe()
    failures = [answer for answer in answers if isinstance(answer, EdgeError)]
    peers, copies = _each_once(answers, presences)
    if peers:
        return peers, failures + [error for _copy, error in copies]
    why = ", and ".join(dict.fromkeys(str(each).replace("; ", ": ") for each in failures))
    raise NetworkError(
        f"no peers found within {timeout_s:g} s by {tried}"
        + (f" (announced, but not reachable: {why})" if why else ""),
        remedy="start `edge peer` on each device with the same --cluster name, or give addresses: "
        "--peer HOST:PORT, or edge.Cluster.connect([...]). On this device alone: edge run MODEL "
        "--local 1, or edge.Cluster.local(1)",
    )


async def watch_peers(
    cluster: str,
    credentials: Credentials | None,
    *,
    interfaces: Sequence[str] | None,
    every_s: float,
    used: Callable[[], Collection[PeerInfo]] = tuple,
    presences: Presences | None = None,
) -> AsyncGenerator[Look]:
    """Peers of the cluster that can be reached, as they are every `every_s`, and whenever one is
    announced or takes its leave.

    used: those that are there, as is known of connections to them; they are not asked. presences:
    what was seen before, which is told of what is seen. Of devices that have the keys of another
    one, a warning says so, once. Raises NetworkError where nobody can look.
    """
    presences = presences or Presences()
    told: set[tuple[str, int]] = set()
    records: dict[str, PeerRecord] = {}
    news = asyncio.Event()
    async with _looking(cluster, credentials, interfaces) as discovery:

        async def follow() -> None:
            try:
                async for event in discovery.watch():
                    if isinstance(event, PeerFound):
                        records[event.record.id] = event.record
                    elif isinstance(event, PeerGone):
                        records.pop(event.id, None)
                    news.set()
            finally:
                news.set()

        following = asyncio.create_task(follow())
        try:
            while True:
                news.clear()
                if following.done():
                    following.result()
                in_use = used()
                # A single address may be another device's, too: of a bridge of containers.
                passed_over = [{peer.address, *peer.addresses} for peer in in_use]
                asked = [
                    record
                    for record in records.values()
                    if not any(each.issuperset(_own_numbers(record)) for each in passed_over)
                ]
                answers = await _reach_all(asked, credentials)
                silent = [
                    address
                    for record, answer in zip(asked, answers, strict=True)
                    if isinstance(answer, EdgeError) and is_silence(answer)
                    for address in record.addresses
                ]
                peers, copies = _each_once(answers, presences, in_use)
                for copy, error in copies:
                    if (copy.id, copy.epoch) not in told:
                        _log.warning("a peer is announced, but left out: %s", error)
                    told.add((copy.id, copy.epoch))
                yield Look(peers=peers, silent=frozenset(silent))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(every_s):
                        await news.wait()
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


@contextlib.asynccontextmanager
async def _looking(
    cluster: str, credentials: Credentials | None, interfaces: Sequence[str] | None
) -> AsyncIterator[Discovery]:
    """Meanwhile, peers that have a key of before are told of the new one."""
    shown = None if credentials is None else credentials.now()
    discovery = transport.ZeroconfDiscovery(
        cluster=cluster, key=None if shown is None else shown.tag_key, interfaces=interfaces
    )
    carrying = None
    if shown is not None and shown.past():
        carrying = asyncio.create_task(push_key_rotation(shown, cluster, interfaces))
    try:
        yield discovery
    except (transport.TransportError, OSError) as error:
        raise NetworkError(f"cannot look for peers: {error}") from error
    finally:
        if carrying is not None:
            carrying.cancel()
            await asyncio.gather(carrying, return_exceptions=True)
        await discovery.aclose()


def _each_once(
    answers: Sequence[PeerInfo | EdgeError],
    presences: Presences | None,
    used: Collection[PeerInfo] = (),
) -> tuple[list[PeerInfo], list[tuple[PeerInfo, PeerError]]]:
    found = [answer for answer in answers if isinstance(answer, PeerInfo)]
    peers, copies = each_once(found, presences, used)
    return sorted(peers, key=lambda peer: (peer.name, peer.id)), copies


async def _reach_missing(
    discovery: Discovery,
    credentials: Credentials | None,
    records: Sequence[PeerRecord],
    answers: Sequence[PeerInfo | EdgeError],
    expected: Collection[str],
) -> list[PeerInfo | EdgeError]:
    """The answers of peers beside `records`, until all the expected devices have answered, for
    MISSING_S at most."""
    loop = asyncio.get_running_loop()
    ends_s = loop.time() + MISSING_S
    known = {record.id for record in records}
    more: list[PeerInfo | EdgeError] = []
    while loop.time() < ends_s and not _devices((*answers, *more)).issuperset(expected):
        found = await browse(
            discovery, timeout_s=ends_s - loop.time(), at_least=len(known) + 1, settle_s=0
        )
        new = [record for record in found if record.id not in known]
        known |= {record.id for record in new}
        more += await _reach_all(new, credentials)
    return more


def _devices(answers: Iterable[PeerInfo | EdgeError]) -> set[str | None]:
    return {answer.device_id for answer in answers if isinstance(answer, PeerInfo)}


def _own_numbers(record: PeerRecord) -> list[str]:
    """Its addresses as the peer itself writes them: link-local ones only where there are no others,
    because each device has its own name for their interface."""
    told = list(record.addresses)
    return [each for each in told if not is_link_local(parse_address(each)[0])] or told


async def _reach_all(
    records: Sequence[PeerRecord], credentials: Credentials | None
) -> list[PeerInfo | EdgeError]:
    """Each, or why it cannot be used: also because another one has told that it is expelled."""
    turns = asyncio.Semaphore(MOST_AT_ONCE)

    async def reach(record: PeerRecord) -> PeerInfo | EdgeError:
        async with turns:
            try:
                return await first_answer(
                    record,
                    partial(
                        describe_peer,
                        credentials=credentials,
                        announced=record.id,
                        timeout_s=ASKED_WITHIN_S,
                    ),
                )
            except EdgeError as error:
                return error

    answers = await asyncio.gather(*map(reach, records))
    return [
        answer if isinstance(answer, EdgeError) else expulsion(answer) or answer
        for answer in answers
    ]
