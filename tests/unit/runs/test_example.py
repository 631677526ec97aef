"""An answer over peers that compute nothing; CONTRIBUTING.md shows it."""

import asyncio
from pathlib import Path

from edge.backends.null.made_up import replies
from edge.demos.bundled import MODEL
from edge.protocol.step import StepLimits
from edge.weights.checkpoint import Checkpoint
from tests.support.null_peers import load, null_peers
from tests.support.scripted_peers import Owner, Results, asked


def test_two_peers_answer_as_one_model_does(tmp_path: Path) -> None:
    limits = StepLimits(context_tokens=64, chunk_tokens=16, requests=2, cached_tokens=64)

    async def main() -> list[int]:
        async with null_peers(tmp_path, 2) as daemons, asyncio.timeout(120):
            model = await load(daemons, "pipeline_2", limits, Owner(), tmp_path)
            sink = Results()
            model.submit(asked([1, 2, 3], sink, new_tokens=5))
            await sink.ended.wait()
            await model.aclose()
            return sink.tokens

    with Checkpoint.open(MODEL) as checkpoint:
        assert asyncio.run(main()) == replies(checkpoint.spec, [1, 2, 3], 5)
