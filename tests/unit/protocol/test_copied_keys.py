"""Two daemons of one id, over real sockets: told, and not mixed up with two addresses of one."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from edge.errors import PeerError
from edge.peer.daemon import PeerDaemon
from edge.peer.settings import PeerSettings
from edge.protocol.peer_info import describe_all, describe_each


async def started(stack: contextlib.AsyncExitStack, folder: Path, name: str) -> PeerDaemon:
    settings = PeerSettings(
        name=name,
        listen="127.0.0.1:0",
        threads=1,
        announce=False,
        cache_root=folder / name,
        cache_limit_bytes=1 << 20,
        backend="null",
    )
    daemon = PeerDaemon(settings, None, id="ab" * 16)
    await daemon.start()
    stack.push_async_callback(daemon.aclose)
    return daemon


def test_a_daemon_with_the_id_of_another_is_told(tmp_path: Path) -> None:
    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:
            first, second = [await started(stack, tmp_path, name) for name in ("old", "copy")]
            (at,), (copied,) = first.resources.addresses, second.resources.addresses
            with pytest.raises(
                PeerError, match=f"copy: at {copied} it has the keys of the device at {at}"
            ):
                await describe_each({at: None, copied: None})
            same = at.replace("127.0.0.1", "localhost")
            infos, failures = await describe_all({at: None, same: None})
            assert ([info.name for info in infos], failures) == (["old"], {})

    asyncio.run(main())
