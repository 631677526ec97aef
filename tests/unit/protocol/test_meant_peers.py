"""What is asked of one peer is asked of no other member that answers at its address."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from edge.errors import NetworkError
from edge.membership.membership import credentials
from edge.protocol.lease import Lease
from edge.protocol.peer_info import (
    PeerInfo,
    describe_peer,
    kept_by,
    memory_rate,
    set_memory,
    take_over,
)
from tests.support.members import Kept
from tests.support.null_peers import null_peers


@pytest.mark.parametrize(
    "ask",
    [
        lambda peer: set_memory(peer, 8 << 30),
        lambda peer: take_over(peer, Lease(run="r", term=1)),
        kept_by,
        memory_rate,
    ],
    ids=["set memory", "take over", "kept files", "memory rate"],
)
def test_another_member_at_its_address_is_not_asked(
    ask: Callable[[PeerInfo], Awaitable[object]], tmp_path: Path
) -> None:
    attic = Kept.founded()
    kitchen, cellar = attic.taking_in("kitchen"), attic.taking_in("cellar")

    async def scenario() -> None:
        async with null_peers(tmp_path, 1, membership=kitchen.membership) as (daemon,):
            shown = credentials(attic.current)
            kitchens = await describe_peer(daemon.resources.addresses[0], shown)
            await ask(kitchens)
            cellars = replace(kitchens, device_id=cellar.membership.identity.id)
            with pytest.raises(NetworkError, match="another device than was expected"):
                await ask(cellars)

    asyncio.run(scenario())
