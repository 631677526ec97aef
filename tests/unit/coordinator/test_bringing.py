"""Weights on their way: opened and closed, and not sent to who leaves."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from pathlib import Path

import pytest

from edge.backends.null.program import NullProgram
from edge.coordinator.bringing import Bringing, make_ready
from edge.demos.bundled import MODEL
from edge.errors import NetworkError, PeerLostError
from edge.planning.load_options import LoadOptions
from edge.progress import OnProgress, Progress, ignore_progress
from edge.protocol.lease import Lease
from edge.protocol.peer_info import describe_peer
from edge.protocol.step import StepLimits
from edge.protocol.wire_rules import WireRules
from edge.transport import WireRule
from edge.weights.checkpoint import Checkpoint
from tests.support.null_peers import null_peers
from tests.support.plans import bundled_plan


def bringing_of(
    checkpoint: Checkpoint, folder: Path, tell: OnProgress = ignore_progress
) -> Bringing:
    options = LoadOptions(dtype="int8")
    return Bringing(
        checkpoint=checkpoint,
        plan=bundled_plan("solo", devices=["a"]),
        options=options,
        weight_format=options.weight_format(checkpoint),
        limits=StepLimits(context_tokens=8, chunk_tokens=8, requests=1, cached_tokens=8),
        wire_rules=WireRules(sums=(WireRule(),), hops=()),
        lease=Lease(),
        cache_root=folder,
        tell=tell,
    )


@pytest.mark.filterwarnings("error::ResourceWarning")
def test_what_was_opened_when_its_load_ends_is_closed(tmp_path: Path) -> None:
    async def main(checkpoint: Checkpoint) -> None:
        bringing = bringing_of(checkpoint, tmp_path)

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


def test_what_was_parked_is_closed_where_its_load_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[NullProgram] = []
    monkeypatch.setattr(NullProgram, "close", lambda program: closed.append(program))

    async def main(checkpoint: Checkpoint) -> None:
        async with null_peers(tmp_path / "peers", 1) as (daemon,):
            peers, bringing = daemon.resources, bringing_of(checkpoint, tmp_path)
            peer = await describe_peer(peers.addresses[0], None)
            async with bringing.source() as source:
                brought = await make_ready(bringing, (0, 0), peer, source)
            (parked,) = peers._parked._parked
            async with peers.loading:  # by somebody else
                opening = asyncio.create_task(bringing.open("again", (0, 0), peer, brought))
                while not peers.sessions:  # noqa: ASYNC110  nobody is told
                    await asyncio.sleep(0.001)
                await brought.client.aclose()
                await asyncio.wait([opening])
                assert isinstance(opening.exception(), NetworkError)
                while peers.sessions:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
            assert closed == [parked.program]
            assert not peers.ledger.uses

    with Checkpoint.open(MODEL) as checkpoint:
        asyncio.run(main(checkpoint))


def test_who_leaves_is_sent_no_more(tmp_path: Path) -> None:
    async def main(checkpoint: Checkpoint) -> None:
        async with null_peers(tmp_path / "peers", 1) as (daemon,):
            sent: list[int] = []

            def tell(progress: Progress) -> None:
                if progress.phase == "send":
                    daemon.resources.leaving.set()
                    sent.append(progress.done)
                    assert progress.done < progress.total

            bringing = bringing_of(checkpoint, tmp_path, tell)
            peer = await describe_peer(daemon.resources.addresses[0], None)
            async with bringing.source() as source:
                with pytest.raises(PeerLostError, match="it is leaving: it was stopped by its"):
                    await bringing.bring((0, 0), peer, source)
            assert sent

    with Checkpoint.open(MODEL) as checkpoint:
        asyncio.run(main(checkpoint))
