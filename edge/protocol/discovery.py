"""From "who is there?" to peers that answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import transport
from edge.errors import EdgeError, NetworkError
from edge.protocol.peer_info import PeerInfo, describe_peer
from transport import Credentials, Discovery, PeerFound, PeerGone, PeerRecord

SETTLE_S = 1.0
"""Once one peer is found, how long to go on listening for others: answers to one question arrive
within a second."""


async def browse(
    discovery: Discovery, *, timeout_s: float, at_least: int = 1
) -> tuple[PeerRecord, ...]:
    """Peers announced within `timeout_s`; ends early when `at_least` so many are there and no new
    one came for SETTLE_S."""
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
                    deadline.reschedule(min(end_s, loop.time() + SETTLE_S))
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
) -> list[PeerInfo]:
    """Peers of the cluster that can be reached, each once, by name.

    Raises NetworkError saying what was tried, when there is none.
    """
    discovery = transport.ZeroconfDiscovery(
        cluster=cluster,
        key=None if credentials is None else credentials.tag_key,
        interfaces=interfaces,
    )
    try:
        records = await browse(discovery, timeout_s=timeout_s, at_least=at_least)
        tried = discovery.describe()
    except (transport.TransportError, OSError) as error:
        raise NetworkError(f"cannot look for peers: {error}") from error
    finally:
        await discovery.aclose()
    answers = await asyncio.gather(*(_reach(record, credentials) for record in records))
    peers = {answer.id: answer for answer in answers if isinstance(answer, PeerInfo)}
    if peers:
        return sorted(peers.values(), key=lambda peer: (peer.name, peer.id))
    failures = "; ".join(dict.fromkeys(str(answer) for answer in answers))
    raise NetworkError(
        f"no peers found within {timeout_s:g} s by {tried}. "
        + (f"Announced, but not reachable: {failures}. " if failures else "")
        + "Start `edge peer` on each device with the same --cluster name, or give addresses: "
        "--peer HOST:PORT, or edge.Cluster.connect([...])"
    )


async def _reach(record: PeerRecord, credentials: Credentials | None) -> PeerInfo | EdgeError:
    """The peer by the first of its addresses that answers, else the last error."""
    failure: EdgeError = NetworkError(f"{record.name} announces no address")
    for address in record.addresses:
        try:
            return await describe_peer(address, credentials, timeout_s=3.0)
        except EdgeError as error:
            failure = error
    return failure
