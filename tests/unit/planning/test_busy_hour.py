"""An hour of devices that something else keeps busy at random, in made-up time: answers go on as
fast as without moves or faster, and there are fewer moves than changes."""

from __future__ import annotations

import random
from collections.abc import Collection

import pytest

from edge.partition import ClusterSpec, Estimate, Plan, UnderWay, choose, estimate, join
from edge.planning.slowdowns import WINDOW_S, DeviceSteps, Slowdowns
from edge.runs.recovery.replanning import CONSIDERS_AGAIN_S, MOVES_APART_S
from tests.support.slow_cases import repeats_are_slow
from tests.unit.partition.test_choose import SMALL, cluster
from tests.unit.partition.test_repair import FAST, SHORT

HOUR_S = 3600
ANSWER_TOKENS = 2000


class Throttling:
    """Something that keeps each device busy now and then."""

    def __init__(
        self, devices: Collection[str], seed: int, healthy_s: float, busy_s: float
    ) -> None:
        """healthy_s, busy_s: for how long on average."""
        self._random = random.Random(seed)
        self._mean_s = healthy_s, busy_s
        self._until_s = {id: self._random.expovariate(1 / healthy_s) for id in devices}
        self.factors = dict.fromkeys(self._until_s, 1.0)
        self.events = 0

    def at(self, now_s: float) -> dict[str, float]:
        """How many times as long each device takes now."""
        for id, until_s in self._until_s.items():
            if now_s >= until_s:
                is_busy = self.factors[id] == 1
                self.factors[id] = self._random.uniform(1.3, 8) if is_busy else 1.0
                self._until_s[id] = now_s + self._random.expovariate(1 / self._mean_s[is_busy])
                self.events += 1
        return self.factors


class Adapting:
    """A model that moves as `edge.runs.recovery.replanning` does, in made-up time."""

    def __init__(self, plan: Plan, devices: ClusterSpec, *, moves: bool) -> None:
        self.tokens, self.moves = 0.0, 0
        self._plan, self._facts = plan, devices
        self._may_move = moves
        self._next_move_s = self._ready_s = 0.0
        self._slowdowns = Slowdowns()
        self._steps = 0
        self._waits_s = 0.0
        self._waiting: ClusterSpec | None = None
        self._estimates: dict[tuple[float, ...], Estimate] = {}
        self._took_s = dict.fromkeys((device.id for device in devices.devices), 0.0)

    def second(self, devices: ClusterSpec, jitter: dict[str, float], *, now_s: float) -> None:
        """A second in which the devices are as fast as that."""
        if now_s < self._ready_s:
            return
        predicted = self._estimate(devices)
        steps = 1 / predicted.token_s
        self.tokens += steps
        self._steps += round(steps)
        for id, seconds in predicted.device_s:
            self._took_s[id] += round(steps) * seconds * jitter[id]

    def _estimate(self, devices: ClusterSpec) -> Estimate:
        key = self._plan.version, *(device.slowed for device in devices.devices)
        if key not in self._estimates:
            self._estimates[key] = estimate(self._plan, SMALL, devices, SHORT)
        return self._estimates[key]

    def window(self, healthy: ClusterSpec, devices: ClusterSpec, *, now_s: float) -> None:
        """The end of a window."""
        if not self._may_move:
            return
        expected = self._estimate(healthy).device_s
        parts = {
            id: DeviceSteps(
                steps=self._steps, took_s=self._took_s[id], expected_s=self._steps * seconds
            )
            for id, seconds in expected
        }
        if now_s >= self._ready_s + WINDOW_S:
            self._slowdowns.note(parts, since_s=now_s - WINDOW_S, now_s=now_s)
        else:
            self._slowdowns.pause()
        self._steps, self._took_s = 0, dict.fromkeys(self._took_s, 0.0)
        if now_s % 30 == 0:
            for id in set(self._slowdowns.factors) - set(self._plan.devices):
                self._slowdowns.looked_at(id, devices.device(id).slowed, now_s=now_s)
        facts = healthy.slowed_by(self._slowdowns.factors)
        if facts == self._facts or now_s < self._next_move_s:
            return
        if facts == self._waiting and now_s < self._waits_s:
            return
        so_far = int(self.tokens) % ANSWER_TOKENS
        under_way = UnderWay(
            requests=1, prompt_tokens=100, answer_tokens=so_far,
            left_tokens=ANSWER_TOKENS - so_far,
        )  # fmt: skip
        pairs = zip(self._facts.devices, facts.devices, strict=True)
        move = join(
            self._plan, SMALL, facts, SHORT, under_way,
            is_healthy_again=any(was.slowed > now.slowed for was, now in pairs),
        )  # fmt: skip
        if move.when == "idle":
            self._waiting, self._waits_s = facts, now_s + CONSIDERS_AGAIN_S
            return
        self._facts = facts
        if move.when == "now":
            assert move.to is not None
            self._plan, self.moves = move.to.plan, self.moves + 1
            self._ready_s = now_s + move.ships_s * 0.1 + move.pause_s
            self._next_move_s = now_s + MOVES_APART_S


def hour(
    seed: int, healthy_s: float, busy_s: float, devices: ClusterSpec, busy: Collection[str]
) -> tuple[float, int, int]:
    """The gain in tokens over staying, the moves, and the changes of a device's speed. busy: the
    devices that something else keeps busy now and then."""
    throttling = Throttling(busy, seed, healthy_s, busy_s)
    noise = random.Random(seed)
    plan = choose(SMALL, devices, SHORT, parallel="pipeline").plan
    moving, staying = (Adapting(plan, devices, moves=each) for each in (True, False))
    for now_s in range(1, HOUR_S + 1):
        slowed = devices.slowed_by(throttling.at(now_s))
        jitter = {
            device.id: noise.lognormvariate(0, 0.08) * (3 if noise.random() < 0.005 else 1)
            for device in devices.devices
        }
        for model in (moving, staying):
            model.second(slowed, jitter, now_s=now_s)
            if now_s % WINDOW_S == 0:
                model.window(devices, slowed, now_s=now_s)
    return moving.tokens / staying.tokens, moving.moves, throttling.events


@pytest.mark.parametrize(
    ("healthy_s", "busy_s", "busy", "seed"),
    repeats_are_slow(
        [
            (240, 90, ("00",), 1),
            (20, 20, ("00",), 1),
            (60, 60, ("00",), 2),
            (240, 90, ("00", "01", "02"), 2),
            (20, 20, ("00", "01", "02"), 1),
            (60, 60, ("00", "01", "02"), 2),
        ],
        of=(0, 1),
    ),
)
def test_an_hour_of_random_throttling_leads_to_few_moves_and_no_loss(
    healthy_s: float, busy_s: float, busy: tuple[str, ...], seed: int
) -> None:
    devices = cluster((4, FAST), (4, FAST / 2), (4, FAST))
    gain, moves, events = hour(seed, healthy_s, busy_s, devices, busy)
    assert 0 < moves <= events
    assert gain >= 0.97


def test_an_hour_in_which_nothing_is_busy_leads_to_no_move() -> None:
    devices = cluster((4, FAST), (4, FAST / 2), (4, FAST))
    assert hour(1, 1.0, 1.0, devices, ()) == (1.0, 0, 0)
