"""What is held is counted by owner, and refused in words."""

from __future__ import annotations

import asyncio

import pytest

from edge.errors import CapacityError
from edge.peer.quota import OwnerSemaphore, Quota, QuotaShare


def test_one_owner_and_all_have_limits() -> None:
    quota = Quota("cups", of_one=2, of_all=3)
    quota.take("a", 2)
    with pytest.raises(CapacityError, match="one device may have 2 cups"):
        quota.take("a")
    quota.take("b")
    with pytest.raises(CapacityError, match="at most 3 cups"):
        quota.take("b")
    quota.give_back("a")
    quota.take("b")
    assert quota.held == 3
    quota.give_back("a")
    quota.give_back("b", 2)
    assert quota.held == 0


def test_connections_of_one_owner_share_and_give_back_their_own() -> None:
    quota = Quota("cups", of_one=3, of_all=9)
    first, second = QuotaShare(quota, "a"), QuotaShare(quota, "a")
    first.take(2)
    second.take()
    with pytest.raises(CapacityError):
        second.take()
    first.give_back_all()
    first.give_back_all()
    assert quota.held == 1
    second.take(2)
    second.give_back()
    second.give_back_all()
    assert quota.held == 0


def test_who_finds_no_room_waits() -> None:
    async def scenario() -> None:
        room = OwnerSemaphore(of_one=6, of_all=10)
        await room.take("a", 6)
        waiting = [asyncio.ensure_future(room.take(owner, 5)) for owner in "ab"]
        large = asyncio.ensure_future(room.take("c", 9))  # more than its share: alone it may
        await asyncio.sleep(0)
        assert not any(each.done() for each in (*waiting, large))
        room.give_back("a", 1)
        await waiting[1]
        room.give_back("b", 5)
        room.give_back("a", 5)
        await waiting[0]
        assert not large.done()
        room.give_back("a", 5)
        await large

    asyncio.run(scenario())
