"""What a model that runs is told of the pace of its devices."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from edge.errors import PeerError
from edge.partition import ClusterSpec, DeviceSpec
from edge.planning.slowdowns import HEALTHY_S, WINDOW_S
from edge.protocol.step_times import TokenSteps
from edge.runs.recovery.pace import DevicePace
from tests.support.known_rates import PROFILE
from tests.support.passing_time import let_pass
from tests.support.peer_infos import peer_info

DESK = DeviceSpec(id="desk", name="desk", memory_bytes=1, threads=1, rates=PROFILE.rates)
ATTIC = replace(DESK, id="attic", name="attic")
STEP_S = 0.01
"""Predicted of each device for a step of one row; more rows take more."""


class Running:
    """A model with an answer, whose devices have counted so many steps."""

    def __init__(self, seats: dict[tuple[int, int], str]) -> None:
        stages: dict[int, list[Any]] = {}
        for (stage, _rank), id in seats.items():
            stages.setdefault(stage, []).append(SimpleNamespace(device=id))
        self.plan = SimpleNamespace(
            devices=tuple(dict.fromkeys(seats.values())),
            stages=[SimpleNamespace(shards=shards) for shards in stages.values()],
        )
        self.answers: tuple[object, ...] = (object(),)
        self.is_recovering = False
        self.recoveries: list[object] = []
        self.counted = {seat: TokenSteps() for seat in seats}
        self.peers = {id: peer_info(id, host=f"{id}'s") for id in self.plan.devices}
        self.forecast = SimpleNamespace(
            proposal=SimpleNamespace(cluster=ClusterSpec(devices=(DESK, ATTIC))), of=self.of
        )
        self.asked: list[tuple[int, int]] = []

    def of(self, *, prompt_tokens: int, new_tokens: int, concurrency: int) -> Any:
        self.asked.append((prompt_tokens, concurrency))
        devices = self.forecast.proposal.cluster.devices
        slowed = {device.id: device.slowed for device in devices}
        each_s = STEP_S * concurrency
        return SimpleNamespace(
            device_s=tuple((id, slowed[id] * each_s) for id in self.plan.devices)
        )

    async def count_steps(self) -> dict[tuple[int, int], TokenSteps]:
        return dict(self.counted)

    def computes(self, steps: int, rows: int, seconds: dict[tuple[int, int], float]) -> None:
        """So many steps more, of so many rows, with a hundred tokens cached. seconds: of each."""
        for seat, each_s in seconds.items():
            before = self.counted[seat]
            self.counted[seat] = TokenSteps(
                steps=before.steps + steps,
                rows=before.rows + steps * rows,
                tokens=before.tokens + steps * rows * 100,
                compute_s=before.compute_s + steps * each_s,
            )


async def windows(
    pace: DevicePace, model: Running, count: int, rows: int, seconds: dict[tuple[int, int], float]
) -> None:
    for _ in range(count):
        model.computes(100, rows, seconds)
        let_pass(WINDOW_S)
        await pace.look(())


@pytest.mark.parametrize(
    ("seconds", "rows", "factors"),
    [
        ({(0, 0): 0.01, (1, 0): 0.01}, 1, {}),
        ({(0, 0): 0.04, (1, 0): 0.01}, 1, {"desk": 4}),
        ({(0, 0): 0.04, (1, 0): 0.04}, 4, {}),  # as predicted for four rows
        ({(0, 0): 0.04, (1, 0): 0.08}, 4, {"attic": 2}),
    ],
)
def test_devices_are_compared_with_the_prediction_for_their_rows(
    seconds: dict[tuple[int, int], float], rows: int, factors: dict[str, float]
) -> None:
    async def main() -> None:
        model: Any = Running({(0, 0): "desk", (1, 0): "attic"})
        pace = DevicePace(model, model)
        await windows(pace, model, 3, rows, seconds)
        assert pace.factors == pytest.approx(factors)
        assert pace.changed == factors.keys()
        assert set(model.asked) == {(100, rows)}
        cluster = model.forecast.proposal.cluster.slowed_by(pace.factors)
        model.forecast.proposal.cluster = cluster
        assert not pace.changed
        await windows(pace, model, 3, rows, seconds)
        assert pace.factors == pytest.approx(factors), "also with facts that know of it"

    asyncio.run(main())


def test_a_device_with_two_shards_computes_both_for_a_step() -> None:
    async def main() -> None:
        model: Any = Running({(0, 0): "desk", (1, 0): "attic", (2, 0): "desk"})
        pace = DevicePace(model, model)
        await windows(pace, model, 3, 1, {(0, 0): 0.005, (1, 0): 0.01, (2, 0): 0.005})
        assert not pace.factors
        await windows(pace, model, 2, 1, {(0, 0): 0.015, (1, 0): 0.01, (2, 0): 0.015})
        assert pace.factors == {"desk": pytest.approx(3)}

    asyncio.run(main())


def test_counters_of_another_run_are_not_compared() -> None:
    """They begin at zero with each load."""

    async def main() -> None:
        model: Any = Running({(0, 0): "desk"})
        pace = DevicePace(model, model)
        await windows(pace, model, 2, 1, {(0, 0): 0.04})
        model.recoveries.append("a move")
        model.counted = {(0, 0): TokenSteps()}
        await windows(pace, model, 2, 1, {(0, 0): 0.04})
        assert not pace.factors
        model.answers = ()
        await windows(pace, model, 1, 1, {(0, 0): 0.04})
        model.answers = (object(),)
        await windows(pace, model, 2, 1, {(0, 0): 0.04})
        assert not pace.factors, "nothing was under way between the windows"
        await windows(pace, model, 1, 1, {(0, 0): 0.04})
        assert pace.factors

    asyncio.run(main())


def test_a_busy_device_without_a_part_is_looked_at_more_and_more_rarely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """But not while answers are under way on its machine."""
    looks: list[float] = []
    factor: float | None = 4.0

    async def measured(_pace: DevicePace, _peer: object, _device: object) -> float:
        looks.append(asyncio.get_running_loop().time())
        if factor is None:
            raise PeerError("desk", "it does not answer")
        return factor

    monkeypatch.setattr(DevicePace, "_measured", measured)

    async def main() -> None:
        nonlocal factor
        model: Any = Running({(0, 0): "desk"})
        pace = DevicePace(model, model)
        await windows(pace, model, 3, 1, {(0, 0): 0.04})
        model.plan.devices = ("attic",)
        model.peers = {"attic": peer_info("attic", host="attic's")}
        model.answers = ()
        desk = peer_info("desk", host="desk's")
        begun_s = asyncio.get_running_loop().time()
        for factor in (4.0,) * 60 + (None,) * 120 + (1.0,) * 100:
            let_pass(WINDOW_S)
            model.answers = (object(),) if factor is None else ()
            model.is_recovering = True  # no counters
            await pace.look([replace(desk, host="attic's") if factor is None else desk])
        times = [round(each - begun_s) for each in looks]
        assert times[:3] == [35, 95, 215]
        assert len(times) == 5, "none for ten minutes, and two when it is healthy"
        assert times[4] - times[3] == HEALTHY_S
        assert not pace.factors

    asyncio.run(main())
