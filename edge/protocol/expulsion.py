"""Whoever is expelled while it is connected is hung up on; the handshake asks those who come."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from itertools import starmap

from edge.errors import RequestError
from edge.transport import Credentials, Member

LOOK_EVERY_S = 1.0


async def until_expelled(
    credentials: Credentials | None,
    other: Member | None,
    devices: Callable[[], Iterable[str | None]] = tuple,
) -> None:
    """Return once the other end is no member any more, or by a later certificate only; or one of
    the other `devices` that are dealt with is none.

    None stands for one without a key, as all have where there are no credentials.
    """
    if credentials is None:
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")
    while True:
        dealt_with: dict[str, int | None] = {id: None for id in devices() if id is not None}
        if other is not None:
            dealt_with[other.id] = other.edition
        with contextlib.suppress(RequestError):  # files of keys that are being mended
            if not all(starmap(credentials.is_admitted, dealt_with.items())):
                return
        await asyncio.sleep(LOOK_EVERY_S)
