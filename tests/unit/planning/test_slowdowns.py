"""When a device counts as busy with something else, and when as healthy again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest

from edge.planning.slowdowns import HEALTHY_S, MOST_HEALTHY_S, WINDOW_S, DeviceSteps, Slowdowns


class Told:
    """Slowdowns that are told windows, one after the other."""

    def __init__(self) -> None:
        self.slowdowns = Slowdowns()
        self.now_s = 100.0

    def window(self, ratios: Mapping[str, float], *, steps: int = 50, span_s: float = 5.0) -> None:
        parts = {
            id: DeviceSteps(steps=steps, took_s=ratio * steps * 0.01, expected_s=steps * 0.01)
            for id, ratio in ratios.items()
        }
        since_s, self.now_s = self.now_s, self.now_s + span_s
        self.slowdowns.note(parts, since_s=since_s, now_s=self.now_s)

    def factors_after(self, ratios: Iterable[float]) -> list[float]:
        """The factor of a device after each of these windows."""
        factors = []
        for ratio in ratios:
            self.window({"desk": ratio})
            factors.append(round(self.slowdowns.factors.get("desk", 1.0), 3))
        return factors


@pytest.mark.parametrize(
    ("ratios", "factors"),
    [
        ([1, 1, 1, 1], [1, 1, 1, 1]),
        ([1, 4, 4], [1, 1, 4]),
        ([4, 4], [1, 4]),  # busy from the first step on: compared with the prediction
        ([1, 4, 1, 4, 1], [1, 1, 1, 1, 1]),
        ([1, 1.4, 1.4, 1.4], [1, 1, 1, 1]),
        ([1, 1.5, 1.5], [1, 1, 1.5]),
        ([0.5, 0.5, 1, 1], [1, 1, 1, 2]),  # faster than predicted before
        ([1.2, 1.2, 1.7, 1.7], [1, 1, 1, 1]),  # slower than predicted before
        ([1, 2, 2, 6, 6], [1, 1, 2, 2, 6]),
        ([1, 2, 2, 2.9, 2.9], [1, 1, 2, 2, 2]),
        ([1, 4, 4, 2, 2, 2, 2, 2, 2, 2], [1, 1, 4, 4, 4, 4, 4, 4, 4, 4]),
    ],
)
def test_a_device_is_slowed_after_two_slow_windows_in_a_row(
    ratios: list[float], factors: list[float]
) -> None:
    assert Told().factors_after(ratios) == factors


def test_a_device_is_healthy_again_after_half_a_minute_of_health() -> None:
    told = Told()
    told.factors_after([1, 4, 4])
    assert told.factors_after([1] * 5) == [4] * 5
    assert told.factors_after([4]) == [4], "which begins the time of health anew"
    assert told.factors_after([1] * 6) == [4] * 5 + [1]


def test_a_device_that_is_slowed_again_and_again_needs_longer_each_time() -> None:
    told, needed_s = Told(), []
    for _ in range(7):
        told.factors_after([4, 4])
        since_s = told.now_s
        while told.slowdowns.factors:
            told.window({"desk": 1.0})
        needed_s.append(told.now_s - since_s)
    assert needed_s == [HEALTHY_S, 60, 120, 240, 480, MOST_HEALTHY_S, MOST_HEALTHY_S]


def test_only_the_device_that_computes_for_long_is_slowed() -> None:
    """Others wait for it meanwhile, which is no part of their times."""
    told = Told()
    for ratio in (1, 5, 5):
        told.window({"desk": ratio, "attic": 1.0})
    assert told.slowdowns.factors == {"desk": pytest.approx(5)}


@pytest.mark.parametrize(("steps", "span_s", "windows"), [(50, 2.0, 6), (7, 5.0, 6), (7, 60.0, 6)])
def test_a_window_has_enough_seconds_and_enough_steps(
    steps: int, span_s: float, windows: int
) -> None:
    told, count = Told(), 0
    while not told.slowdowns.factors:
        told.window({"desk": 3.0}, steps=steps, span_s=span_s)
        count += 1
    assert count == windows


def test_a_pause_ends_a_window() -> None:
    told = Told()
    told.window({"desk": 4.0})
    told.slowdowns.pause()
    told.window({"desk": 4.0})
    assert not told.slowdowns.factors
    told.window({"desk": 4.0}, span_s=WINDOW_S / 2)
    told.slowdowns.pause()
    told.window({"desk": 4.0})
    assert not told.slowdowns.factors
    told.window({"desk": 4.0})
    assert told.slowdowns.factors


def test_a_device_without_a_part_is_healthy_after_two_good_looks() -> None:
    told = Told()
    told.factors_after([0.5, 2, 2])
    for factor, after in ((1.0, 4), (3.0, 4), (1.1, 4), (1.1, None)):
        told.now_s += HEALTHY_S
        told.slowdowns.looked_at("desk", factor, now_s=told.now_s)
        assert told.slowdowns.factors.get("desk") == after
