"""Whoever is expelled while it is connected is hung up on; the handshake asks those who come."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable

from edge.errors import RequestError
from edge.transport import Credentials

LOOK_EVERY_S = 1.0


async def until_expelled(
    credentials: Credentials | None, devices: Callable[[], Iterable[str | None]]
) -> None:
    """Return once one of the devices that are dealt with is no member any more.

    None stands for one without a key, as all have where there are no credentials.
    """
    if credentials is None:
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")
    while True:
        with contextlib.suppress(RequestError):  # files of keys that are being mended
            if not all(credentials.is_admitted(id) for id in set(devices()) if id is not None):
                return
        await asyncio.sleep(LOOK_EVERY_S)
