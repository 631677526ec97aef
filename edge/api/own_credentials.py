"""What this process shows to peers."""

from __future__ import annotations

import logging
import socket

from edge.concurrency.blocking import run_blocking
from edge.membership.current import CurrentMembership
from edge.transport import Credentials

_log = logging.getLogger(__name__)


async def own_credentials(*, insecure: bool) -> Credentials | None:
    """Nothing with `insecure`, and a warning that says so.

    Raises RequestError for files of keys that cannot be used.
    """
    if insecure:
        _log.warning(
            "insecure: no keys and no encryption; whoever is on the network reads prompts and "
            "answers, and may answer in a peer's place"
        )
        return None
    return await run_blocking(lambda: CurrentMembership(socket.gethostname()).credentials())
