"""Connections to a member are closed when it is expelled. New connections are checked by the
handshake."""

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
    """Return once the other end is no longer a member with this certificate, or one of `devices` is
    no longer a member.

    None stands for an end without a key. Without credentials it never returns.
    """
    if credentials is None:
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")
    while True:
        dealt_with: dict[str, int | None] = {id: None for id in devices() if id is not None}
        if other is not None:
            dealt_with[other.id] = other.edition
        with contextlib.suppress(RequestError):  # key files that are being repaired
            if not all(starmap(credentials.is_admitted, dealt_with.items())):
                return
        await asyncio.sleep(LOOK_EVERY_S)
