"""Links to devices that a coordinator names: to members alone, and it learns nothing of others.

A coordinator says where a neighbour is, and any address may stand there. So that a peer is of no
use for looking around in its network, a failure is always the same sentence after the same time:
whether the port is closed, silent, or another program's is told to this peer's own log alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, MutableMapping

from edge import transport
from edge.errors import NetworkError
from edge.protocol.fields import printable
from edge.protocol.heartbeat import LINK_TIMEOUT_S
from edge.protocol.topology import Place
from edge.transport import Credentials, Link

DIAL_TIMEOUT_S = 4.0
"""For one address of a neighbour, at the most."""

_QUICK_S = 1.0
"""For each of several addresses at first: some may lie in networks that we cannot reach, and the
right one answers within this but for the farthest."""

_log = logging.getLogger(__name__)


async def dial(
    place: Place,
    hello: Mapping[str, object],
    credentials: Credentials | None,
    reached: MutableMapping[str, str],
    *,
    timeout_s: float = DIAL_TIMEOUT_S,
) -> Link:
    """A link to the first of the neighbour's addresses that answers.

    reached: where devices answered before, by id; that address comes first, so that dead ones cost
    their time once. Each has a moment, and where none answers in it `timeout_s`. An address that
    does not answer takes all of its time, whatever is there: with less, the time until the next
    one answers would tell. Raises NetworkError naming the neighbour when none does, and before
    anything is dialled where no device is named, or one that was expelled.
    """
    if credentials is not None and not _may_be_member(place.device, credentials):
        raise NetworkError(
            f"cannot link to {place.name}: no device of this cluster is said to be there, or one "
            "that was expelled",
            remedy="pair it with `edge pair`",
        )
    loop = asyncio.get_running_loop()
    last = None if place.device is None else reached.get(place.device)
    addresses = sorted(place.addresses, key=lambda address: address != last)
    patient = [(address, timeout_s) for address in addresses]
    quick = [(address, min(_QUICK_S, timeout_s)) for address in addresses]
    for address, limit_s in quick + patient if len(quick) > 1 else patient:
        ends_at = loop.time() + limit_s
        try:
            link = await transport.connect_link(
                address,
                hello=hello,
                credentials=credentials,
                device=place.device,
                timeout_s=limit_s,
                link_timeout_s=LINK_TIMEOUT_S,
            )
        except transport.TransportError as error:
            _log.info("cannot link to %s: %s", place.name, printable(error))
        else:
            if place.device is not None:  # it has proved to be that one
                reached[place.device] = address
            return link
        await asyncio.sleep(ends_at - loop.time())
    raise NetworkError(
        f"cannot link to {place.name}: it could not be reached",
        remedy="the devices must reach each other, not only the coordinator: check their "
        "firewalls, and the peer's log (edge peer --log-level info)",
    )


def _may_be_member(device: str | None, credentials: Credentials) -> bool:
    """Whoever answers proves that it is this one; nobody can prove to be nobody."""
    return device is not None and credentials.now().is_admitted(device, None)
