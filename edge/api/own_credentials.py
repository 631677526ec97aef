"""The keys by which this process authenticates itself to peers."""

from __future__ import annotations

import logging
import socket

from edge.concurrency.blocking import run_blocking
from edge.membership.current import CurrentMembership
from edge.membership.store import MembershipStore, config_root
from edge.transport import Credentials

_log = logging.getLogger(__name__)


async def lenders() -> dict[str, str]:
    """Names, by id, of the paired devices that may lend, and of this device while a daemon of it
    is announced. Raises RequestError for unusable key files."""

    def known() -> dict[str, str]:
        membership = CurrentMembership(socket.gethostname()).current()
        found = dict(membership.lenders)
        if MembershipStore(config_root()).is_telling():
            found[membership.identity.id] = "this device"
        return found

    return await run_blocking(known)


async def own_credentials(*, insecure: bool) -> Credentials | None:
    """The credentials of this device; None, and a warning, with `insecure`.

    Raises RequestError for unusable key files.
    """
    if insecure:
        _log.warning(
            "insecure: no keys and no encryption; anyone on the network can read prompts and "
            "answers, and can pose as a peer"
        )
        return None
    return await run_blocking(lambda: CurrentMembership(socket.gethostname()).credentials())
