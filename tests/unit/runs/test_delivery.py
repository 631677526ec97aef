"""Weights on their way: opened and closed, and not sent to who leaves."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from edge.backends.null.program import NullProgram
from edge.demos.bundled import MODEL
from edge.errors import NetworkError, PeerError, PeerLostError, RequestError
from edge.memory.ledger import LEAST_MODEL_BYTES, Use
from edge.memory.rebalance import RebalanceOptions
from edge.peer.resources import PeerResources
from edge.planning.load_options import LoadOptions
from edge.progress import OnProgress, Progress, ignore_progress
from edge.protocol.lease import Lease
from edge.protocol.peer_info import PeerInfo, describe_peer
from edge.protocol.session_frames import Close
from edge.protocol.step import StepLimits
from edge.protocol.wire_rules import WireRules
from edge.runs.delivery import Delivered, Delivery, make_ready
from edge.runs.resolved import ResolvedLoad
from edge.transport import WireRule
from edge.weights.checkpoint import Checkpoint
from tests.support.null_peers import null_peers
from tests.support.plans import bundled_plan


def delivery_of(
    checkpoint: Checkpoint, folder: Path, tell: OnProgress = ignore_progress
) -> Delivery:
    weight_format = LoadOptions(dtype="int8").weight_format(checkpoint)
    return Delivery(
        checkpoint=checkpoint,
        load=ResolvedLoad(
            plan=bundled_plan("solo", devices=["a"]),
            spec=weight_format.graded(checkpoint.spec),
            weight_format=weight_format,
            limits=StepLimits(context_tokens=8, chunk_tokens=8, requests=1, cached_tokens=8),
            kv_dtype="float32",
            wire_rules=WireRules(sums=(WireRule(),), hops=()),
        ),
        lease=Lease(),
        cache_root=folder,
        tell=tell,
    )


@pytest.mark.filterwarnings("error::ResourceWarning")
def test_what_was_opened_when_its_load_ends_is_closed(tmp_path: Path) -> None:
    async def main(checkpoint: Checkpoint) -> None:
        delivery = delivery_of(checkpoint, tmp_path)

        async def use() -> None:
            async with delivery.source():
                raise AssertionError("it was cancelled")

        async with delivery.source():
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
            peers, delivery = daemon.resources, delivery_of(checkpoint, tmp_path)
            peer = await describe_peer(peers.addresses[0], None)
            async with delivery.source() as source:
                delivered = await make_ready(delivery, (0, 0), peer, source)
            (parked,) = peers._parked._parked
            async with peers.loading.turn("another"):  # by somebody else
                opening = asyncio.create_task(delivery.open("again", (0, 0), peer, delivered))
                while not peers.sessions:  # noqa: ASYNC110  nobody is told
                    await asyncio.sleep(0.001)
                await delivered.client.aclose()
                await asyncio.wait([opening])
                assert isinstance(opening.exception(), NetworkError)
                while peers.sessions:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
            assert closed == [parked.program]
            assert not peers.ledger.uses

    with Checkpoint.open(MODEL) as checkpoint:
        asyncio.run(main(checkpoint))


@contextlib.asynccontextmanager
async def delivered_to(
    checkpoint: Checkpoint, folder: Path
) -> AsyncIterator[tuple[PeerResources, Delivery, PeerInfo, Delivered]]:
    """A peer with a shard on its disk."""
    async with null_peers(folder / "peers", 1) as (daemon,):
        delivery = delivery_of(checkpoint, folder)
        peer = await describe_peer(daemon.resources.addresses[0], None)
        async with delivery.source() as source:
            delivered = await delivery.deliver((0, 0), peer, source)
        try:
            yield daemon.resources, delivery, peer, delivered
        finally:
            await delivered.client.aclose()


def test_who_is_replaced_as_it_waits_for_its_turn_to_load_hears_of_it(tmp_path: Path) -> None:
    """And is in nobody's way."""

    async def main(checkpoint: Checkpoint) -> None:
        async with delivered_to(checkpoint, tmp_path) as (resources, delivery, peer, delivered):
            async with resources.loading.turn("another"):  # by somebody else
                opening = asyncio.create_task(delivery.open("s", (0, 0), peer, delivered))
                while not resources.sessions:  # noqa: ASYNC110  nobody is told
                    await asyncio.sleep(0.001)
                lease = delivery.lease
                await resources.leases.take_over(None, replace(lease, term=lease.term + 1))
            async with asyncio.timeout(60):
                with pytest.raises(RequestError, match="another coordinator has taken over"):
                    await opening
                async with resources.loading.turn("another"):
                    pass

    with Checkpoint.open(MODEL) as checkpoint:
        asyncio.run(main(checkpoint))


def test_what_a_changed_promise_is_not_yet_kept_by_is_not_parked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session that ends before it has given back what the ledger says that it has."""
    may_go_on = threading.Event()

    async def main(checkpoint: Checkpoint) -> None:
        async with delivered_to(checkpoint, tmp_path) as (resources, delivery, peer, delivered):
            await delivery.open("s", (0, 0), peer, delivered)
            (hosted,), (whole,) = resources.sessions.values(), resources.ledger.uses.values()
            # The layers of the bundled model are too small to make a difference.
            less = replace(whole, weight_bytes=whole.weight_bytes // 2)

            def counted(*_: object, **__: object) -> RebalanceOptions:
                assert threading.current_thread() is not threading.main_thread(), "it may take long"
                return RebalanceOptions(uses={0: whole, 1: less}, planned=0)

            monkeypatch.setattr("edge.peer.resources.rebalance_options", counted)
            other = Use(weight_bytes=LEAST_MODEL_BYTES)
            resources._ledger = resources.ledger.with_use("other", other)
            budget_bytes = resources.ledger.baseline.total + other.total + less.total
            hosted.shard._thread.post(lambda: (may_go_on.wait(), None)[1])
            try:
                changing = asyncio.create_task(resources.promise(budget_bytes))
                while less not in resources.ledger.uses.values():  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
                close = Close(session="s", parks=True)
                closing = asyncio.create_task(delivered.client.call(close))
                while not hosted.shard._is_over:  # noqa: ASYNC110  nobody is told
                    await asyncio.sleep(0.001)
                assert less in resources.ledger.uses.values()
            finally:
                may_go_on.set()
            await closing
            await changing
            assert list(resources.ledger.uses) == ["other"]

    with Checkpoint.open(MODEL) as checkpoint:
        asyncio.run(main(checkpoint))


def test_memory_is_free_also_where_closing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_program: NullProgram) -> None:
        raise OSError("of a library")

    async def main(checkpoint: Checkpoint) -> None:
        async with delivered_to(checkpoint, tmp_path) as (resources, delivery, peer, delivered):
            for parks in (False, True):
                await delivery.open("s", (0, 0), peer, delivered)
                monkeypatch.setattr(NullProgram, "close", fail)
                if parks:
                    resources.leaving.set()  # then nothing is kept after all
                with contextlib.suppress(PeerError):
                    await delivered.client.call(Close(session="s", parks=parks))
                assert not resources._parked._parked
                assert not resources.ledger.uses

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

            delivery = delivery_of(checkpoint, tmp_path, tell)
            peer = await describe_peer(daemon.resources.addresses[0], None)
            async with delivery.source() as source:
                with pytest.raises(PeerLostError, match="its user has stopped it"):
                    await delivery.deliver((0, 0), peer, source)
            assert sent

    with Checkpoint.open(MODEL) as checkpoint:
        asyncio.run(main(checkpoint))
