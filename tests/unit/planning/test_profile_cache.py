"""What was measured is known for a day, unless the device or the model is another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from edge.planning.profile_cache import (
    MEASURED_AGAIN_AFTER_S,
    UNSTEADY_AGAIN_AFTER_S,
    FactsCache,
    device_key,
)
from edge.protocol.peer_info import PeerInfo
from tests.support.facts import crowd_of
from tests.support.formats import uniform_format
from tests.support.specs import changed
from tests.unit.protocol.test_assignment import SPEC
from tests.unit.protocol.test_measurements import PROFILE, TIMES
from tests.unit.protocol.test_places import peer

INT4 = uniform_format("int4")
CROWD = crowd_of(
    2, (1e-5, 2e-4), rows=(1, 128), slower=(1.1, 1.2), pace=(0.9, 1.1), link=(2e-5, 2e9)
)
A, B = peer("a", "10.0.0.1:5"), peer("b", "10.0.0.2:5")


class Clock:
    now_s = 1e9

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def cache(tmp_path: Path, clock: Clock) -> FactsCache:
    return FactsCache(tmp_path / "measured", now_s=clock)


def test_nothing_is_known_at_first(cache: FactsCache) -> None:
    assert cache.profile(A, SPEC, INT4) is None
    assert cache.link(A, B) is None
    cache.forget_device(A)
    cache.forget_link(A, B)


def test_what_was_kept_is_known(cache: FactsCache) -> None:
    cache.keep_profile(A, SPEC, INT4, PROFILE)
    cache.keep_link(A, B, TIMES)
    assert cache.profile(A, SPEC, INT4) == PROFILE
    assert cache.link(A, B) == TIMES
    assert cache.profile(B, SPEC, INT4) is None
    assert cache.link(B, A) is None


@pytest.mark.parametrize(
    "other",
    [
        replace(A, identity="changed"),
        replace(A, host="another"),
        replace(A, own_name="another"),
    ],
    ids=["identity", "host", "name"],
)
def test_another_device_is_not_known(cache: FactsCache, other: PeerInfo) -> None:
    cache.keep_profile(A, SPEC, INT4, PROFILE)
    assert cache.profile(other, SPEC, INT4) is None
    assert device_key(other) != device_key(A)


def test_a_daemon_that_was_started_again_is_known(cache: FactsCache) -> None:
    cache.keep_profile(A, SPEC, INT4, PROFILE)
    again = replace(A, id="new", address="10.0.0.1:6", free_bytes=5)
    assert cache.profile(again, SPEC, INT4) == PROFILE


def test_another_shape_or_format_is_not_known(cache: FactsCache) -> None:
    cache.keep_profile(A, SPEC, INT4, PROFILE)
    assert cache.profile(A, changed(SPEC, ffn_columns=16), INT4) is None
    for other in (("int8", 32, "fast"), ("int4", 128, "fast"), ("int4", 32, "high")):
        assert cache.profile(A, SPEC, uniform_format(*other)) is None


def test_the_same_shape_under_another_name_is_known(cache: FactsCache) -> None:
    cache.keep_profile(A, SPEC, INT4, PROFILE)
    assert cache.profile(A, changed(SPEC, family="qwen3", context_tokens=64), INT4) == PROFILE


def test_another_address_is_another_link(cache: FactsCache) -> None:
    cache.keep_link(A, B, TIMES)
    assert cache.link(A, replace(B, address="10.0.0.3:5")) is None
    assert cache.link(A, replace(B, addresses=("10.0.0.3:5",))) is None
    assert cache.link(replace(A, identity="changed"), B) == TIMES


@pytest.mark.parametrize(
    ("later_s", "is_known"),
    [(MEASURED_AGAIN_AFTER_S - 1, True), (MEASURED_AGAIN_AFTER_S, False), (-1.0, False)],
)
def test_a_day_later_it_is_measured_again(
    cache: FactsCache, clock: Clock, later_s: float, is_known: bool
) -> None:
    """And so it is when the clock was set back."""
    cache.keep_profile(A, SPEC, INT4, PROFILE)
    cache.keep_link(A, B, TIMES)
    clock.now_s += later_s
    assert (cache.profile(A, SPEC, INT4) is not None) is is_known
    assert (cache.link(A, B) is not None) is is_known


@pytest.mark.parametrize(
    ("later_s", "is_known"), [(UNSTEADY_AGAIN_AFTER_S - 1, True), (UNSTEADY_AGAIN_AFTER_S, False)]
)
def test_a_device_that_was_not_steady_is_measured_again_soon(
    cache: FactsCache, clock: Clock, later_s: float, is_known: bool
) -> None:
    unsteady = replace(PROFILE, is_unsteady=True)
    steady = replace(PROFILE, is_unsteady=False)
    cache.keep_profile(A, SPEC, INT4, unsteady)
    cache.keep_profile(B, SPEC, INT4, steady)
    clock.now_s += later_s
    assert cache.profile(A, SPEC, INT4) == (unsteady if is_known else None)
    assert cache.profile(B, SPEC, INT4) == steady


def test_a_device_is_forgotten_in_all_models(cache: FactsCache) -> None:
    int8 = uniform_format("int8")
    for format_ in (INT4, int8):
        cache.keep_profile(A, SPEC, format_, PROFILE)
        cache.keep_profile(B, SPEC, format_, PROFILE)
    cache.forget_device(A)
    assert cache.profile(A, SPEC, INT4) is cache.profile(A, SPEC, int8) is None
    assert cache.profile(B, SPEC, INT4) == cache.profile(B, SPEC, int8) == PROFILE


def test_what_peers_cost_each_other_is_known_of_just_these_peers(cache: FactsCache) -> None:
    crowd = replace(CROWD, host=A.host)
    assert cache.crowds([A, B], SPEC, INT4) is None
    cache.keep_crowds([A, B], SPEC, INT4, [crowd])
    assert cache.crowds([B, A], SPEC, INT4) == (crowd,)
    assert cache.crowds([A], SPEC, INT4) is None
    assert cache.crowds([A, B, replace(B, name="c")], SPEC, INT4) is None
    assert cache.crowds([A, B], replace(SPEC, hidden_size=2 * SPEC.hidden_size), INT4) is None
    cache.forget_device(B)
    assert cache.crowds([A, B], SPEC, INT4) is None


def test_a_link_is_forgotten_from_either_end(cache: FactsCache) -> None:
    cache.keep_link(A, B, TIMES)
    cache.forget_link(B, A)
    assert cache.link(A, B) is None


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "5", "{}", "null", '{"measured_at_s": "now"}', '{"measured_at_s": 1e9}',
     '{"measured_at_s": 1e9, "profile": {}, "neighbours": [], "link": {}}',
     '{"measured_at_s": 1e9, "profile": 5, "neighbours": 5, "link": 5}', "[" * 100_000],
    ids=lambda content: content[:40],
)  # fmt: skip
def test_a_damaged_file_counts_as_none(cache: FactsCache, tmp_path: Path, content: str) -> None:
    cache.keep_profile(A, SPEC, INT4, PROFILE)
    cache.keep_link(A, B, TIMES)
    files = list((tmp_path / "measured").rglob("*.json"))
    assert len(files) == 2
    for file in files:
        file.write_text(content)
    assert cache.profile(A, SPEC, INT4) is None
    assert cache.link(A, B) is None


def test_a_disk_that_takes_nothing_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = FactsCache(tmp_path / "file" / "measured")
    cache.keep_profile(A, SPEC, INT4, PROFILE)
    cache.keep_link(A, B, TIMES)
    assert cache.profile(A, SPEC, INT4) is None
