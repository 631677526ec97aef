"""A relay leaves no connection behind, whenever it ends."""

from __future__ import annotations

import asyncio
import socket
from threading import Event

import pytest

from edge.demos.relay import Fault, Relay


def test_it_ends_while_a_connection_is_hung_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """That it waits for the one end then must not keep it from closing the other."""
    waits = Event()

    async def closes_late(_writer: asyncio.StreamWriter) -> None:
        waits.set()
        await asyncio.Event().wait()

    with socket.create_server(("127.0.0.1", 0)) as target:
        relay = Relay(f"127.0.0.1:{target.getsockname()[1]}", Fault(cut_after=0))
        try:
            with socket.create_connection(
                ("127.0.0.1", int(relay.address.rpartition(":")[2]))
            ) as it:
                monkeypatch.setattr(asyncio.StreamWriter, "wait_closed", closes_late)
                it.sendall(b"x")
                assert waits.wait(60)
        finally:
            relay.close()
    (passage,) = relay.passages
    assert len(passage.writers) == 2
    assert all(each.is_closing() for each in passage.writers)
