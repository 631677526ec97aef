"""A device that never answers is waited for a few times."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from edge.api import peer_search
from edge.api.absent_devices import MOST_WAITED, note, worth_waiting
from edge.host.cache_paths import CACHE_VARIABLE
from edge.protocol.peer_info import PeerInfo
from tests.support.peer_infos import peer_info

PAIRED = {"a" * 32: "attic", "b" * 32: "phone"}
ATTIC, PHONE = PAIRED


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    return tmp_path / "measured" / "absent.json"


def test_a_device_is_waited_for_until_it_was_missed_often_and_once_it_is_found() -> None:
    for _ in range(MOST_WAITED):
        assert worth_waiting("c", PAIRED) == set(PAIRED)
        note("c", PAIRED, {ATTIC, None})
    assert worth_waiting("c", PAIRED) == {ATTIC}
    assert worth_waiting("another", PAIRED) == set(PAIRED)
    note("another", PAIRED, ())
    assert worth_waiting("c", PAIRED) == {ATTIC}
    note("c", PAIRED, {PHONE})
    assert worth_waiting("c", PAIRED) == set(PAIRED)


def test_a_device_that_is_paired_again_is_waited_for() -> None:
    for _ in range(MOST_WAITED):
        note("c", PAIRED, {ATTIC})
    note("c", {ATTIC: "attic"}, {ATTIC})
    assert worth_waiting("c", PAIRED) == set(PAIRED)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"c": 5}', '{"c": {"x": "y"}}', '{"c": []}'])
def test_a_file_that_makes_no_sense_is_none(content: str, cache: Path) -> None:
    cache.parent.mkdir()
    cache.write_text(content)
    assert worth_waiting("c", PAIRED) == set(PAIRED)
    note("c", PAIRED, ())
    assert worth_waiting("c", PAIRED) == set(PAIRED)


@pytest.mark.parametrize("interfaces", [None, ["eth0"]])
def test_a_search_waits_for_those_that_are_worth_it(
    interfaces: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[set[str]] = []

    async def find_peers(
        *_where: object, expected: Collection[str] = (), **_more: object
    ) -> tuple[list[PeerInfo], list[Any]]:
        waited.append(set(expected))
        return [peer_info("attic", device_id=ATTIC)], []

    async def paired() -> dict[str, str]:
        return PAIRED

    async def credentials(**_named: object) -> object:
        return object()

    monkeypatch.setattr(peer_search, "find_peers", find_peers)
    monkeypatch.setattr(peer_search, "lenders", paired)
    monkeypatch.setattr(peer_search, "own_credentials", credentials)
    for _ in range(MOST_WAITED + 1):
        asyncio.run(
            peer_search.discover(
                "c", timeout_s=1.0, at_least=1, interfaces=interfaces, insecure=False
            )
        )
    last = set(PAIRED) if interfaces else {ATTIC}
    assert waited == [set(PAIRED)] * MOST_WAITED + [last]
