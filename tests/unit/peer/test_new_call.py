"""A new kind of frame: its type, a line in the table of frames, and a line in that of answers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from edge.errors import EdgeError
from edge.peer.connection import Connection
from edge.protocol.client import PeerClient
from edge.protocol.frame_codec import Call
from edge.protocol.frame_table import FRAMES
from tests.support.null_peers import null_peers


@dataclass(frozen=True, slots=True, kw_only=True)
class Sum:
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Add(Call[Sum]):
    """How much is that?"""

    kind, limit_s = "add", 60.0
    numbers: tuple[int, ...]


async def add(call: Add) -> Sum:
    return Sum(total=sum(call.numbers))


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FRAMES, Add.kind, Add)
    begun = Connection.__init__

    def begin(self: Connection, *args: Any, **options: Any) -> None:
        begun(self, *args, **options)
        self._calls[Add] = add

    monkeypatch.setattr(Connection, "__init__", begin)


def test_a_daemon_answers_a_new_call_and_refuses_what_it_cannot_be(tmp_path: Path) -> None:
    async def main() -> None:
        async with null_peers(tmp_path, 1) as (daemon,):
            client = await PeerClient.connect(daemon.resources.addresses[0], None)
            assert await client.call(Add(numbers=(1, 2, 39))) == Sum(total=42)
            with pytest.raises(EdgeError, match="numbers"):
                await client.call(Add(numbers=("two",)))  # type: ignore[arg-type]
            assert await client.call(Add(numbers=())) == Sum(total=0), "and goes on"
            await client.aclose()

    asyncio.run(main())
