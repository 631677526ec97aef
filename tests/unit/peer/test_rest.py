"""When a device lends nothing: the rules, and the change from one state to the other."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from edge.errors import RequestError
from edge.peer.rest import IDLE_AFTER_S, IN_USE_S, LOOK_EVERY_S, DeviceUse, Rest, why_rest
from edge.peer.settings import PeerSettings
from tests.support.passing_time import let_pass, somebody_waits_for

GIB = 1 << 30
ALL = PeerSettings(name="a", on_battery="off", idle_only=True, spare_memory_bytes=GIB)
NONE = PeerSettings(name="a")


def use(**said: Any) -> DeviceUse:
    usual = {"on_battery": False, "unused_s": 1e6, "free_bytes": 8 * GIB}
    return DeviceUse(**{**usual, **said})


@pytest.mark.parametrize(
    ("now", "begins", "goes_on"),
    [
        (use(), None, None),
        (use(on_battery=True), "battery", "battery"),
        (use(unused_s=0.0), "somebody", "somebody"),
        (use(unused_s=IN_USE_S - 1), "somebody", "somebody"),
        (use(unused_s=IN_USE_S), None, "somebody"),
        (use(unused_s=IDLE_AFTER_S), None, None),
        (use(unused_s=None), None, None),
        (use(free_bytes=GIB - 1), "1024.0 MiB of its memory", "1024.0 MiB of its memory"),
        (use(free_bytes=GIB), None, "1.0 GiB of its memory"),
        (use(free_bytes=2 * GIB), None, None),
    ],
)
def test_the_rules(now: DeviceUse, begins: str | None, goes_on: str | None) -> None:
    for rests, expected in ((False, begins), (True, goes_on)):
        reason = why_rest(ALL, now, rests=rests)
        assert (reason is None) == (expected is None)
        assert expected is None or (reason is not None and expected in reason)
        assert why_rest(NONE, now, rests=rests) is None


def test_it_rests_and_lends_again() -> None:
    states = [use(), use(on_battery=True), use(on_battery=True), use()]
    reasons: list[str | None] = []

    async def main() -> None:
        rest = Rest(PeerSettings(name="a", on_battery="off"), lambda _settings: states.pop(0))
        begins = asyncio.ensure_future(rest.begins())
        while not somebody_waits_for(LOOK_EVERY_S):  # noqa: ASYNC110 - a thread looks
            await asyncio.sleep(0)
        let_pass(LOOK_EVERY_S)
        await begins
        reasons.append(rest.reason)
        ends = asyncio.ensure_future(rest.ends())
        while not somebody_waits_for(LOOK_EVERY_S):  # noqa: ASYNC110 - a thread looks
            await asyncio.sleep(0)
        let_pass(LOOK_EVERY_S)
        await ends
        reasons.append(rest.reason)

    asyncio.run(main())
    assert reasons == ["it runs on its battery", None]
    assert states == []


def test_a_device_without_rules_is_not_looked_at() -> None:
    def look(_settings: PeerSettings) -> DeviceUse:
        raise AssertionError

    async def main() -> None:
        rest = Rest(NONE, look)
        await rest.ends()
        begins = asyncio.ensure_future(rest.begins())
        await asyncio.sleep(0)
        assert not begins.done()
        begins.cancel()

    asyncio.run(main())


def test_a_system_that_does_not_tell_its_use() -> None:
    with pytest.raises(RequestError, match="does not tell when the device is in use"):
        Rest(PeerSettings(name="a", idle_only=True), lambda _settings: use(unused_s=None))
