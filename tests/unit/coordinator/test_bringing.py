"""Weights that were opened for a load which nobody waits for any more are closed."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from pathlib import Path

import pytest

from edge.coordinator.bringing import Bringing
from edge.demos.bundled import MODEL
from edge.planning.load_options import LoadOptions
from edge.protocol.lease import Lease
from edge.protocol.step import StepLimits
from edge.protocol.wire_rules import WireRules
from edge.transport import WireRule
from edge.weights.checkpoint import Checkpoint
from tests.support.plans import bundled_plan


@pytest.mark.filterwarnings("error::ResourceWarning")
def test_what_was_opened_when_its_load_ends_is_closed(tmp_path: Path) -> None:
    options = LoadOptions(dtype="int8")

    async def main(checkpoint: Checkpoint) -> None:
        bringing = Bringing(
            checkpoint=checkpoint,
            plan=bundled_plan("solo", devices=["a"]),
            options=options,
            weight_format=options.weight_format(checkpoint),
            limits=StepLimits(context_tokens=8, chunk_tokens=8, requests=1, cached_tokens=8),
            wire_rules=WireRules(sums=(WireRule(),), hops=()),
            lease=Lease(),
            cache_root=tmp_path,
        )

        async def use() -> None:
            async with bringing.source():
                raise AssertionError("it was cancelled")

        async with bringing.source():
            pass  # from now on it is only opened
        using = asyncio.create_task(use())
        await asyncio.sleep(0)
        using.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await using

    with Checkpoint.open(MODEL) as checkpoint:
        asyncio.run(main(checkpoint))
        gc.collect()
