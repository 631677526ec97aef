"""A check of replies against their predictions, while the plan changes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from edge.api.async_model import AsyncModel


def test_replies_of_one_plan_are_not_compared_with_the_counters_of_another() -> None:
    """A device is lost after a slow reply: peers are asked once the model runs again."""

    def proposal() -> Any:
        return SimpleNamespace(
            choice=SimpleNamespace(predicted=object()), plan=None, is_rough=False
        )

    answers = ["a slow one"]
    forecast = SimpleNamespace(take=answers.clear)
    model = SimpleNamespace(
        _asking=SimpleNamespace(require_open=lambda: None),
        _held=SimpleNamespace(forecast=forecast),
        proposal=proposal(),
        peers={},
    )

    async def measure() -> list[Any]:
        model.proposal = proposal()
        return [object()]

    model.measure = measure
    assert asyncio.run(AsyncModel.check(cast(AsyncModel, model))) is None
    assert not answers, "they are over"
