"""Dialling a neighbour at the addresses that a coordinator gives: members only, no port scanning.

A coordinator may name any address. So that it cannot scan this peer's network, every failure takes
the same time and has the same text. Only this peer's own log says whether the port was closed,
silent or another program's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, MutableMapping

from edge import transport
from edge.errors import NetworkError
from edge.host.interfaces import dial_order
from edge.protocol.fields import one_line
from edge.protocol.heartbeat import LINK_TIMEOUT_S
from edge.protocol.topology import Place
from edge.transport import Credentials, Link, with_scopes

DIAL_TIMEOUT_S = 4.0
"""Time limit for one address, in seconds."""

_QUICK_S = 1.0
"""Time limit for each of several addresses in a first round, as some may lie in unreachable
networks. The right one answers within it unless it is very far away."""

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

    reached: the last address that answered, by device id; it is tried first, then the others in
    the order of `dial_order`. If no address answers within a short first round, each gets
    `timeout_s`. An address that fails always takes its full time: otherwise timing would tell what
    is there. Raises NetworkError naming the neighbour if none answers, and before any dialling if
    the device is unnamed or expelled.
    """
    if credentials is not None and not _may_be_member(place.device, credentials):
        raise NetworkError(
            f"cannot link to {place.name}: the coordinator names no device of this cluster, or one "
            "that was expelled",
            remedy="pair it with `edge pair`",
        )
    loop = asyncio.get_running_loop()
    last = None if place.device is None else reached.get(place.device)
    addresses = sorted(
        dial_order(with_scopes(place.addresses)), key=lambda address: address != last
    )
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
            _log.info("cannot link to %s: %s", place.name, one_line(error))
        else:
            if place.device is not None:  # the handshake has proved its identity
                reached[place.device] = address
            return link
        await asyncio.sleep(ends_at - loop.time())
    raise NetworkError(
        f"cannot link to {place.name}: it could not be reached",
        remedy="the devices must reach each other, not only the coordinator: check their "
        "firewalls, and the peer's log (edge peer --log-level info)",
    )


def _may_be_member(device: str | None, credentials: Credentials) -> bool:
    """Whether `device` is named and not expelled. The handshake proves its identity later."""
    return device is not None and credentials.now().is_admitted(device, None)
