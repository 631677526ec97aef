"""Copies of a model over real peers that compute nothing: who answers, and what a loss costs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import edge
from edge.api import loading
from edge.backends.null.made_up import replies
from edge.demos.bundled import MODEL
from edge.peer.daemon import PeerDaemon
from edge.planning.copies import CopiesForecast, LoadSeen, forecast_copies
from edge.planning.load_options import parse_copies
from edge.planning.measured_proposal import measured_proposal
from edge.planning.proposal import Proposal
from edge.protocol.peer_info import PeerInfo
from edge.runs import shipping
from edge.runs.copied_model import CopiedModel, ModelCopy
from edge.runs.load import load_model
from edge.runs.model import MOST_LOSSES_WITHOUT_A_TOKEN, RunningModel
from edge.runs.recovery import candidates, copying
from edge.runs.run import PlanRun
from edge.server.cluster_view import cluster_view
from edge.server.metrics import Metrics
from edge.server.observer import LastSeen
from edge.weights.checkpoint import Checkpoint
from tests.support.known_rates import know_rates
from tests.support.null_peers import null_peers
from tests.support.scripted_peers import Results, asked
from tests.support.slow_cases import repeats_are_slow

BEGINNINGS = (list(range(100, 164)), list(range(300, 364)))
MANY_TOKENS = 40


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    know_rates(monkeypatch.setattr)
    monkeypatch.setenv("EDGE_CACHE", str(tmp_path / "cache"))
    # Nobody looks for devices before a test has time pass.
    monkeypatch.setattr(candidates, "LOOK_EVERY_S", 1e5)


def expected(prompt: Sequence[int], count: int) -> list[int]:
    with Checkpoint.open(MODEL) as checkpoint:
        return replies(checkpoint.spec, list(prompt), count)


@contextlib.asynccontextmanager
async def copies(
    daemons: Sequence[PeerDaemon], count: int = 2, **options: Any
) -> AsyncIterator[tuple[edge.AsyncModel, CopiedModel]]:
    addresses = [each.resources.addresses[0] for each in daemons]
    load = {"dtype": "int8", "context_tokens": 256, "concurrency": 4, "copies": count, **options}
    async with (
        asyncio.timeout(120),
        await edge.AsyncCluster.connect(addresses, insecure=True) as cluster,
        await cluster.load(MODEL, **load) as model,
    ):
        front = model._held.running
        assert isinstance(front, CopiedModel)
        yield model, front


async def whole(stream: edge.AsyncReplyStream) -> edge.Reply:
    async for _ in stream:
        pass
    return stream.reply()


def ask(model: edge.AsyncModel, prompt: Sequence[int], tokens: int = 4) -> edge.AsyncReplyStream:
    return model.stream(list(prompt), max_new_tokens=tokens, ignore_eos=True)


def test_requests_that_begin_alike_meet_on_one_copy(tmp_path: Path) -> None:
    async def main() -> None:
        async with null_peers(tmp_path, 2) as daemons, copies(daemons) as (model, front):
            first = [ask(model, [*beginning, 1]) for beginning in BEGINNINGS]
            assert [len(copy.running.answers) for copy in front.copies] == [1, 1]
            await asyncio.gather(*map(whole, first))
            for number in (2, 3, 4):
                for index, beginning in enumerate(BEGINNINGS):
                    prompt = [*beginning, number]
                    reply = await whole(ask(model, prompt))
                    assert list(reply.token_ids) == expected(prompt, 4)
                    assert reply.statistics["found_tokens"] >= 60
                    assert front.copies[index].answered == number
            assert {peer.name for peer in model.peers.values()} == {"null-0", "null-1"}
            view = cluster_view(model, LastSeen(), Metrics(), answers=0)
            assert view["copies"] == [
                {"devices": [name], "answers": 0, "answered": 4} for name in ("null-0", "null-1")
            ]
            assert [device["name"] for device in view["devices"]] == ["null-0", "null-1"]
            assert view["spares"] == []
            assert view["notes"][-1] == (
                "2 copies: null-0 (0 under way of 4), null-1 (0 under way of 4)"
            )
            assert model.work.answer_tokens >= 8 * 4 - 8

    asyncio.run(main())


def test_requests_that_begin_alike_meet_before_the_first_has_ended(tmp_path: Path) -> None:
    async def main() -> None:
        async with null_peers(tmp_path, 2) as daemons, copies(daemons) as (model, front):
            streams = [ask(model, [*BEGINNINGS[0] * 2, number]) for number in range(2)]
            assert [len(copy.running.answers) for copy in front.copies] == [2, 0]
            await asyncio.gather(*map(whole, streams))

    asyncio.run(main())


def test_answers_of_a_lost_copy_go_on_on_another(tmp_path: Path) -> None:
    prompts = [[*BEGINNINGS[number % 2], number] for number in range(4)]

    async def main() -> None:
        async with null_peers(tmp_path, 2) as daemons, copies(daemons) as (model, front):
            streams = [ask(model, prompt, MANY_TOKENS) for prompt in prompts]
            for stream in streams:
                await anext(stream)
            assert [len(copy.running.answers) for copy in front.copies] == [2, 2]
            await daemons[0].aclose()
            found = await asyncio.gather(*map(whole, streams))
            for prompt, reply in zip(prompts, found, strict=True):
                assert list(reply.token_ids) == expected(prompt, MANY_TOKENS)
            assert [copy.devices for copy in front.copies] == [("null-1",)]
            (recovery,) = model.recoveries
            assert recovery.requests == 2
            assert "the copy on null-0 is lost" in recovery.reason
            assert "its answers go on on null-1" in recovery.reason
            assert [len(reply.recoveries) for reply in found] == [1] * 4
            assert not model.is_over
            # The last copy is lost: then the model has ended.
            await daemons[1].aclose()
            with pytest.raises(edge.PeerError):
                await whole(ask(model, [1, 2]))
            assert model.is_over

    asyncio.run(main())


@pytest.mark.parametrize("is_spare", [True, False], ids=["a spare device", "it comes back"])
def test_a_lost_copy_is_loaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_spare: bool
) -> None:
    monkeypatch.setattr(candidates, "LOOK_EVERY_S", 0.01)

    async def until_two(front: CopiedModel) -> None:
        def answer() -> int:
            return sum(copy.running.run is not None for copy in front.copies)

        while not front.recoveries or answer() < 2:  # noqa: ASYNC110
            await asyncio.sleep(0)

    async def main() -> None:
        count = 3 if is_spare else 2
        async with null_peers(tmp_path, count) as daemons, copies(daemons) as (model, front):
            assert [copy.devices for copy in front.copies] == [("null-0",), ("null-1",)]
            address = daemons[0].resources.addresses[0]
            await daemons[0].aclose()
            again = PeerDaemon(replace(daemons[0].resources.settings, listen=address), None)
            try:
                if not is_spare:
                    await again.start()
                await until_two(front)
                # Without keys a daemon that starts again is another one.
                names = {copy.in_words.removesuffix("-2") for copy in front.copies}
                assert names == ({"null-1", "null"} if is_spare else {"null-1", "null-0"})
                streams = [ask(model, [*beginning, 1]) for beginning in BEGINNINGS]
                assert [len(copy.running.answers) for copy in front.copies] == [1, 1]
                await asyncio.gather(*map(whole, streams))
                await model.aclose()
            finally:
                await again.aclose()

    asyncio.run(main())


def test_a_look_for_devices_that_fails_is_logged_and_followed_by_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(candidates, "LOOK_EVERY_S", 0.0)
    looks, is_over = 0, asyncio.Event()

    async def fill(*_: object) -> None:
        nonlocal looks
        looks += 1
        if looks == 1:
            raise ValueError("not foreseen")
        is_over.set()

    monkeypatch.setattr(copying.Copying, "_fill", fill)

    async def main() -> None:
        async with null_peers(tmp_path, 2) as daemons, copies(daemons):
            await is_over.wait()

    asyncio.run(main())
    assert "not foreseen" in caplog.text


def test_a_look_at_the_load_that_fails_is_logged_and_followed_by_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks, is_over = 0, asyncio.Event()

    def fails_once(*arguments: Any) -> CopiesForecast | None:
        nonlocal looks
        looks += 1
        if looks == 1:
            raise ValueError("not foreseen")
        is_over.set()
        return forecast_copies(*arguments)

    async def main() -> None:
        async with automatic(tmp_path, 1) as model:
            monkeypatch.setattr(copying, "forecast_copies", fails_once)
            look_often(monkeypatch)
            await ask_until(model, is_over)

    asyncio.run(main())
    assert "not foreseen" in caplog.text


def test_a_cancelled_answer_is_forgotten(tmp_path: Path) -> None:
    async def main() -> None:
        async with null_peers(tmp_path, 2) as daemons, copies(daemons) as (model, front):
            streams = [ask(model, [*beginning, 1], MANY_TOKENS) for beginning in BEGINNINGS]
            for stream in streams:
                await anext(stream)
                await stream.aclose()
            assert front.answers == ()
            prompt = [*BEGINNINGS[0], 2]
            assert list((await whole(ask(model, prompt))).token_ids) == expected(prompt, 4)

    asyncio.run(main())


def test_an_answer_that_ends_every_copy_is_given_up(tmp_path: Path) -> None:
    """It may be what ends them. One that has got a token since is not."""

    async def main() -> None:
        async with null_peers(tmp_path, 2) as daemons, copies(daemons) as (_model, front):
            sinks = [Results(), Results()]
            answers = [asked([1, 2, 3], sink, new_tokens=200) for sink in sinks]
            error = edge.PeerLostError("somebody", "is lost")
            for number in range(MOST_LOSSES_WITHOUT_A_TOKEN + 1):
                answers[1].tokens.append(number)
                stays = front.takes_over_from(RunningModel(None), answers, error)
                assert stays == ()
                for copy in front.copies:  # as their plans end, and leave them
                    for answer in answers:
                        copy.running.cancel(answer.id)
            assert [sink.errors for sink in sinks] == [[error], []]

    asyncio.run(main())


def test_one_id_is_under_way_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with null_peers(tmp_path, 2) as daemons, copies(daemons) as (model, _front):
            first = model.stream([1, 2, 3], max_new_tokens=MANY_TOKENS, id="a", ignore_eos=True)
            with pytest.raises(edge.RequestError, match="under way"):
                await whole(model.stream([1, 2, 3], max_new_tokens=2, id="a"))
            await first.aclose()

    asyncio.run(main())


def test_more_copies_than_devices_are_refused(tmp_path: Path) -> None:
    async def main() -> None:
        async with null_peers(tmp_path, 2) as daemons:
            with pytest.raises(edge.CapacityError, match="fits whole on 2 of 2 devices, and 3"):
                async with copies(daemons, 3):
                    pass
            for daemon in daemons:
                assert not daemon.resources.sessions

    asyncio.run(main())


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"copies": 0}, "copies must be auto or a number, not 0; give auto, or 1 to 64"),
        ({"copies": 65}, "not 65"),
        ({"copies": True}, "not True"),
        ({"copies": "two"}, "two"),
        ({"copies": 2, "plan": "tensor"}, "a plan is for a model without copies; leave it out"),
        ({"copies": "auto", "draft": "x"}, "a draft model is for a model without copies"),
        ({"copies": 2, "standby": "kv"}, "standby"),
        ({"copies": 2, "stream": "on"}, "stream"),
    ],
)
def test_bad_options(options: dict[str, Any], why: str) -> None:
    with pytest.raises(edge.RequestError, match=why):
        edge.LoadOptions(**options)


@pytest.mark.parametrize(("text", "copies"), [("auto", "auto"), ("1", 1), ("64", 64)])
def test_copies_as_text(text: str, copies: object) -> None:
    assert parse_copies(text) == copies
    for bad in ("", "-1", "0", "1.5", "65", "Auto"):
        with pytest.raises(edge.RequestError, match="copies must be"):
            parse_copies(bad)


@contextlib.asynccontextmanager
async def automatic(
    folder: Path,
    concurrency: int,
    daemons: Sequence[PeerDaemon] | None = None,
    context_tokens: int | None = 256,
) -> AsyncIterator[edge.AsyncModel]:
    """daemons: None: two that it starts."""
    load: dict[str, Any] = {"dtype": "int8", "context_tokens": context_tokens}
    async with null_peers(folder, 0 if daemons else 2) as started:
        addresses = [each.resources.addresses[0] for each in daemons or started]
        async with (
            asyncio.timeout(120),
            await edge.AsyncCluster.connect(addresses, insecure=True) as cluster,
            await cluster.load(MODEL, copies="auto", concurrency=concurrency, **load) as model,
        ):
            yield model


@pytest.fixture
def gain(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Copies are predicted to gain by requests at once, which they do not on one host; or as the
    test says."""
    said: dict[str, float] = {}

    def predicted(
        one: Proposal, copies: Sequence[Proposal], requests: int
    ) -> CopiesForecast | None:
        found = forecast_copies(one, copies, requests)
        if found is None:
            return None
        copied = said.get("copies", float(min(4, requests)))
        return replace(found, one_tokens_per_s=2.0, copies_tokens_per_s=copied)

    monkeypatch.setattr(copying, "forecast_copies", predicted)
    return said


@pytest.mark.usefixtures("gain")
@pytest.mark.parametrize(("concurrency", "count"), [(1, 1), (8, 2)])
def test_auto_begins_with_what_its_requests_at_once_gain_by(
    tmp_path: Path, concurrency: int, count: int
) -> None:
    async def main() -> None:
        async with automatic(tmp_path, concurrency) as model:
            assert len(model.copies) == count
            said = "copies auto " + ("runs the copies" if count > 1 else "keeps one plan")
            assert said in " ".join(model.notes)
            prompt = BEGINNINGS[0]
            assert list((await whole(ask(model, prompt))).token_ids) == expected(prompt, 4)

    asyncio.run(main())


def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two looks at the load make a window, and a change may follow another at once."""
    monkeypatch.setattr(copying, "LOOK_EVERY_S", 0.001)
    monkeypatch.setattr(copying, "MOVES_APART_S", 0.0)
    monkeypatch.setattr(LoadSeen.__init__, "__defaults__", (2,))


def test_auto_changes_with_the_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gain: dict[str, float]
) -> None:
    """To copies where these are faster for it, and back; nobody loses an answer by it."""
    look_often(monkeypatch)
    counts: set[int] = set()

    async def asks_on(model: edge.AsyncModel, number: int, until: int) -> None:
        prompt = [*BEGINNINGS[number % 2], number]
        while len(model.copies) != until:
            reply = await whole(ask(model, prompt, 8))
            assert list(reply.token_ids) == wanted[number]
            counts.add(len(model.copies))

    wanted = [expected([*BEGINNINGS[number % 2], number], 8) for number in range(4)]

    async def main() -> None:
        async with automatic(tmp_path, 1) as model:
            assert len(model.copies) == 1
            for copied, count in ((4.0, 2), (1.0, 1)):
                gain["copies"] = copied
                await asyncio.gather(*(asks_on(model, number, count) for number in range(4)))
                assert not model.is_over

    asyncio.run(main())
    assert counts == {1, 2}


@pytest.mark.parametrize(
    ("lost", "way"), repeats_are_slow([(0, "copies"), (1, "one"), (1, "copies"), (0, "one")])
)
def test_a_device_lost_in_a_change_does_not_end_the_model(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gain: dict[str, float],
    lost: int,
    way: str,
) -> None:
    """Once nothing of the model is loaded, one device of two is lost."""
    monkeypatch.setattr(shipping, "FIRST_DELAY_S", 0.0)
    gain["copies"] = 4.0 if way == "one" else 1.0  # what it begins with
    gone = asyncio.Event()

    async def main() -> None:
        async with null_peers(tmp_path, 2) as daemons:
            remove = CopiedModel.remove

            async def then_lost(front: CopiedModel, copy: ModelCopy) -> None:
                await remove(front, copy)
                if not front.copies and not gone.is_set():
                    await daemons[lost].aclose()
                    gone.set()

            monkeypatch.setattr(CopiedModel, "remove", then_lost)
            async with automatic(tmp_path, 8, daemons) as model:
                before = len(model.copies)
                assert before == (2 if way == "one" else 1)
                look_often(monkeypatch)
                gain["copies"] = 1.0 if way == "one" else 4.0
                answered = asyncio.create_task(ask_until(model, gone))
                await gone.wait()
                prompt = [*BEGINNINGS[1], 1]
                assert list((await whole(ask(model, prompt, 8))).token_ids) == expected(prompt, 8)
                await answered
                assert [copy.devices for copy in model.copies] == [(f"null-{1 - lost}",)]
                assert not model.is_over

    asyncio.run(main())


async def ask_until(model: edge.AsyncModel, event: asyncio.Event) -> None:
    """Ask so that there is a load, and expect each answer."""
    prompt = [*BEGINNINGS[0], 1]
    wanted = expected(prompt, 8)
    while not event.is_set():
        assert list((await whole(ask(model, prompt, 8))).token_ids) == wanted


def test_a_loss_while_copies_are_exchanged_does_not_end_the_model(tmp_path: Path) -> None:
    """Only the end of the exchange says whether there are others."""

    async def main() -> None:
        async with null_peers(tmp_path, 2) as daemons, copies(daemons) as (_model, front):
            front.hold()
            for daemon in daemons:
                await daemon.aclose()
            while front.copies:  # noqa: ASYNC110
                await asyncio.sleep(0)
            assert front.failure is None
            front.release()
            assert "no copy of the model could be loaded" in str(front.failure)

    asyncio.run(main())


def test_a_change_that_failed_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gain: dict[str, float]
) -> None:
    """One copy ran already when another could not be loaded."""
    gain["copies"] = 1.0
    changed, loads = asyncio.Event(), 0

    async def lost_once(*arguments: Any, **options: Any) -> PlanRun:
        nonlocal loads
        loads += 1
        if loads == 2:
            raise edge.PeerLostError("null-1", "it was lost in a load")
        return await load_model(*arguments, **options)

    def release(front: CopiedModel) -> None:
        ways.append(len(front.copies))
        if len(front.copies) == 2:
            changed.set()
        released(front)

    ways: list[int] = []
    released = CopiedModel.release

    async def main() -> None:
        async with automatic(tmp_path, 1) as model:
            monkeypatch.setattr(copying, "load_model", lost_once)
            monkeypatch.setattr(CopiedModel, "release", release)
            look_often(monkeypatch)
            gain["copies"] = 4.0
            await ask_until(model, changed)
            assert ways == [1, 2]
            assert len(model.copies) == 2

    asyncio.run(main())


def shorten(monkeypatch: pytest.MonkeyPatch, module: Any, usual: int, most: int) -> None:
    """Plans that the module makes have this context, and at most that if more is asked for."""

    async def proposal(
        checkpoint: Checkpoint, peers: Sequence[PeerInfo], options: edge.LoadOptions, **named: Any
    ) -> Proposal:
        if (options.context_tokens or 0) > most:
            raise edge.CapacityError("a context that long does not fit")
        options = replace(options, context_tokens=options.context_tokens or usual)
        return await measured_proposal(checkpoint, peers, options, **named)

    monkeypatch.setattr(module, "measured_proposal", proposal)


@pytest.mark.parametrize("fits", [True, False])
def test_copies_in_place_of_one_plan_keep_its_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gain: dict[str, float], fits: bool
) -> None:
    """Else the model stays on the one plan."""
    shorten(monkeypatch, loading, 256, 256)
    shorten(monkeypatch, copying, 128, 256 if fits else 128)
    gain["copies"] = 1.0

    async def main() -> None:
        async with automatic(tmp_path, 1, context_tokens=None) as model:
            assert model.context_tokens == 256
            look_often(monkeypatch)
            gain["copies"] = 4.0
            if not fits:
                assert not looks_at_the_load(model)
                return
            until_copies = asyncio.Event()
            asking = asyncio.create_task(ask_until(model, until_copies))
            while len(model.copies) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0)
            until_copies.set()
            await asking
            assert {copy.proposal.context_tokens for copy in model.copies} == {256}
            prompt = [1 + number % 500 for number in range(200)]
            assert list((await whole(ask(model, prompt, 8))).token_ids) == expected(prompt, 8)

    asyncio.run(main())


@pytest.mark.usefixtures("gain")
@pytest.mark.parametrize("of_one", [128, 256])
def test_one_plan_in_place_of_copies_keeps_their_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_one: int
) -> None:
    shorten(monkeypatch, loading, of_one, of_one)
    shorten(monkeypatch, copying, 256, 256)

    async def main() -> None:
        async with automatic(tmp_path, 8, context_tokens=None) as model:
            assert (len(model.copies), model.context_tokens) == (2, 256)
            assert looks_at_the_load(model) == (of_one == 256)

    asyncio.run(main())


def looks_at_the_load(model: edge.AsyncModel) -> bool:
    (found,) = model._held.attendants
    assert isinstance(found, copying.Copying)
    return len(found._tasks) > 1
