"""Daemons that measure themselves and their links: what a plan gets, and what is kept of it.

How fast anything was is not for a test to say; that it was measured, and what of it is kept, is.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import edge
from edge import transport
from edge.errors import PeerLostError, ProtocolError
from edge.partition import ClusterSpec
from edge.partition.cost.message_times import NO_LINK_S, Network
from edge.planning import rehearsal
from edge.planning.cluster_profile import forget_device, forget_link, measured_cluster
from edge.planning.profile_cache import FactsCache
from edge.progress import Progress
from edge.protocol.client import PeerClient
from edge.protocol.fields import to_json
from edge.protocol.frame_codec import Event, to_frame
from edge.protocol.heartbeat import show_life
from edge.protocol.kv_frames import KvRows
from edge.protocol.measurements import Glance, Probe, Profile, Span
from edge.protocol.peer_frames import Describe
from edge.protocol.peer_info import PeerInfo, describe_all
from edge.protocol.topology import Place
from edge.transport import Channel, Frame
from edge.weights.formats import WeightFormat
from tests.support import passing_time
from tests.support.checkpoints import TinyCheckpoint
from tests.support.formats import uniform_format
from tests.support.processes import Daemon, own_credentials, start_together

FORMAT = uniform_format("int4")

LITTLE = ("--model-memory", "16MiB")
"""Enough for the model, and measured with less of it: in half the time."""


@pytest.fixture(autouse=True)
def rates() -> None:
    """Measured."""


@pytest.fixture(scope="module")
def pair(
    tmp_path_factory: pytest.TempPathFactory, nothing_left_running_by_the_module: None
) -> Iterator[list[Daemon]]:
    folder = tmp_path_factory.mktemp("pair")
    with start_together(
        lambda: Daemon(folder / "a", "--no-announce", "--name", "a", *LITTLE),
        lambda: Daemon(folder / "b", "--no-announce", "--name", "b", *LITTLE),
    ) as daemons:
        yield daemons
        for daemon in daemons:
            daemon.await_free()
            assert daemon.messages == ""
            left = [path.name for path in daemon.cache.iterdir()]
            assert sorted(left) == ["messages", "packed", "shards"], "measurements leave none"


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint: Callable[..., TinyCheckpoint]) -> TinyCheckpoint:
    return tiny_checkpoint("llama")


class Questions:
    """`measured_cluster` with a cache of its own, and what it told meanwhile."""

    def __init__(self, checkpoint: TinyCheckpoint, cache: Path) -> None:
        self._spec = checkpoint.spec
        self.cache = cache
        self.notes: list[str] = []
        self.progress: list[Progress] = []

    @property
    def measured(self) -> list[str]:
        """The peers that measured themselves, in this order, and "" when links were measured."""
        return [each.peer for each in self.progress if each.done == each.total]

    def ask(
        self,
        peers: list[PeerInfo],
        *,
        on_progress: Callable[[Progress], None] | None = None,
        format_: WeightFormat = FORMAT,
        **options: bool,
    ) -> ClusterSpec:
        self.notes, self.progress = [], []
        return asyncio.run(
            measured_cluster(
                peers,
                self._spec,
                format_,
                cache_root=self.cache,
                on_progress=on_progress or self.progress.append,
                on_note=self.notes.append,
                **options,  # type: ignore[arg-type]
            )
        )


@pytest.fixture(scope="module")
def first_answer(
    pair: list[Daemon], checkpoint: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Questions, ClusterSpec]:
    """The pair, measured with nothing known."""
    first = Questions(checkpoint, tmp_path_factory.mktemp("known"))
    peers = peers_of(pair)
    unknown = first.ask(peers, only_known=True)
    assert unknown.devices == tuple(peer.device() for peer in peers)
    assert first.measured == []
    return first, first.ask(peers)


@pytest.fixture
def known(
    first_answer: tuple[Questions, ClusterSpec], checkpoint: TinyCheckpoint, tmp_path: Path
) -> Questions:
    """Somebody who has measured the pair."""
    cache = shutil.copytree(first_answer[0].cache, tmp_path / "cache")
    return Questions(checkpoint, Path(cache))


@pytest.fixture
def questions(checkpoint: TinyCheckpoint, tmp_path: Path) -> Questions:
    return Questions(checkpoint, tmp_path / "cache")


def peers_of(daemons: list[Daemon]) -> list[PeerInfo]:
    infos, failures = asyncio.run(
        describe_all(dict.fromkeys((daemon.address for daemon in daemons), own_credentials()))
    )
    assert not failures
    return infos


def steady(notes: list[str]) -> list[str]:
    """What was noted, but for that this machine has other things to do, too."""
    return [note for note in notes if "varies: " not in note]


def test_peers_measure_themselves_and_their_link(
    pair: list[Daemon], first_answer: tuple[Questions, ClusterSpec], known: Questions
) -> None:
    peers = peers_of(pair)
    questions, cluster = first_answer
    assert [device.id for device in cluster.devices] == [peer.id for peer in peers]
    assert len({device.host for device in cluster.devices}) == 1
    for device, peer in zip(cluster.devices, peers, strict=True):
        rates = device.rates
        assert (device.host, device.memory_bytes) == (peer.host, peer.model_free_bytes)
        assert rates is not None
        assert rates.rows[:3] == (1, 4, 32)
        assert all(each > 0 for each in rates.seconds_per_byte)
        shared = zip(rates.shared_seconds_per_byte, rates.seconds_per_byte, strict=True)
        assert all(together >= alone for together, alone in shared)
        assert rates.run_s > 0
        assert rates.sample_s > 0
        assert rates.step_s > 0
        assert rates.disk_bytes_per_s is not None
    ends = {(link.source, link.target) for link in cluster.links}
    assert ends == {(peers[0].id, peers[1].id), (peers[1].id, peers[0].id)}
    (crowd,) = cluster.crowds
    assert (crowd.host, crowd.count, crowd.rows[0]) == (peers[0].host, 2, 1)
    assert all(each > 0 for each in crowd.slower)
    assert all(0 < link.latency_s < 10 for link in cluster.links)
    assert sorted(questions.measured) == ["", "a", "b"]
    assert {each.phase for each in questions.progress} == {"measure"}
    assert steady(questions.notes) == []
    assert known.ask(peers, only_known=True).crowds == (crowd,)


def test_what_is_known_is_not_measured(
    pair: list[Daemon],
    first_answer: tuple[Questions, ClusterSpec],
    known: Questions,
    tmp_path: Path,
) -> None:
    """Links are looked at; for a device alone its daemon need not even be there."""
    peers = peers_of(pair)
    _asked, first = first_answer
    for only_known in (True, False):
        again = known.ask(peers, only_known=only_known)
        assert again.devices == first.devices
        assert {(link.source, link.target) for link in again.links} == {
            (link.source, link.target) for link in first.links
        }
        assert set(known.measured) <= {""}, "what the links were found to be is their time"
    forget_link(peers[1], peers[0], cache_root=known.cache)
    known.ask(peers)
    assert known.measured == [""], "one link"
    forget_device(peers[1], cache_root=known.cache)
    found = known.ask(peers, only_known=True)
    assert found.devices[1].rates == found.devices[0].rates, "as fast as the one like it"
    assert set(known.measured) <= {""}
    cache = FactsCache(known.cache / "measured")
    times = cache.link(peers[0], peers[1])
    assert times is not None
    with start_together(
        lambda: Daemon(tmp_path / "a", "--no-announce", "--name", "a"),
        lambda: Daemon(tmp_path / "b", "--no-announce", "--name", "b"),
    ) as daemons:
        gone = peers_of(daemons)
        for daemon in daemons:
            daemon.kill()
    cache.keep_link(gone[0], gone[1], times)
    for refresh in (True, False):
        with pytest.raises(PeerLostError) as raised:
            known.ask(gone, refresh=refresh, only_known=not refresh)
        assert raised.value.peer == "a"


@pytest.mark.parametrize("is_unsteady", [True, False])
@pytest.mark.parametrize("only_known", [True, False])
def test_a_link_that_has_changed_is_measured_again(
    only_known: bool, is_unsteady: bool, pair: list[Daemon], known: Questions
) -> None:
    """A cable in place of a network without one, say, which was not steady."""
    peers = peers_of(pair)
    cache = FactsCache(known.cache / "measured")
    times = cache.link(peers[0], peers[1])
    assert times is not None
    hour = Span(low_s=3600.0, middle_s=3600.0, high_s=3600.0)
    for glance in (replace(times.glance, echo_s=hour), replace(times.glance, back_s=hour)):
        changed = replace(times, latency_s=3600.0, glance=glance, is_unsteady=is_unsteady)
        cache.keep_link(peers[0], peers[1], changed)
        cluster = known.ask(peers, only_known=only_known)
        assert known.measured == [""]
        assert all(link.latency_s < 3600.0 for link in cluster.links)
        now = cache.link(peers[0], peers[1])
        assert now is not None
        assert now.glance != glance


def test_what_neighbours_take_from_each_other_goes_with_the_links_it_was_measured_with(
    pair: list[Daemon], known: Questions
) -> None:
    peers = peers_of(pair)
    before = known.ask(peers, only_known=True)
    (crowd,) = before.crowds
    cache = FactsCache(known.cache / "measured")
    times = cache.link(peers[0], peers[1])
    assert times is not None
    cache.keep_link(peers[0], peers[1], replace(times, latency_s=9 * times.latency_s))
    after = known.ask(peers, only_remembered=True)
    assert after.crowds == before.crowds
    assert {link.latency_s for link in after.links} != {link.latency_s for link in before.links}
    one, other = (peer.id for peer in peers)
    for cluster in (before, after, replace(after, links=())):
        assert Network(cluster).link(one, other) == crowd.link
    assert Network(replace(after, crowds=())).link(one, other) != crowd.link


def test_another_format_and_another_neighbour_are_measured(
    pair: list[Daemon], questions: Questions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a peer is alone is known; what it shares is not. It is measured with copies of answers,
    as peers of one host send them."""
    heard: list[Event] = []

    class Hearing(rehearsal._Rehearsal):
        def _hear(self, client: PeerClient, event: Event) -> None:
            heard.append(event)
            super()._hear(client, event)

    monkeypatch.setattr(rehearsal, "_Rehearsal", Hearing)
    peers = peers_of(pair)
    assert questions.ask(peers[:1]).crowds == ()
    assert questions.measured == ["a"]
    assert heard == []
    assert len(questions.ask(peers).crowds) == 1
    assert sorted(questions.measured) == ["", "b"]
    copied = [part for each in heard if isinstance(each, KvRows) for part in each.parts]
    assert len(copied) >= rehearsal._ANSWERS, "of each of its answers"
    assert min(part.first for part in copied) == rehearsal._PROMPT_TOKENS, "and not of prompts"
    questions.ask(peers[:1], format_=uniform_format("float32"))
    assert questions.measured == ["a"]


def test_a_busy_peer_says_so_and_is_not_remembered(
    pair: list[Daemon], questions: Questions, checkpoint: TinyCheckpoint
) -> None:
    with (
        edge.Cluster.connect([pair[0].address]) as cluster,
        cluster.load(checkpoint.path, dtype="float32", context_tokens=64) as model,
    ):
        expected = checkpoint.greedy(checkpoint.prompt(5), 4)
        for _ in range(2):
            found = questions.ask(peers_of(pair[:1]))
            assert found.devices[0].rates is not None
            assert questions.measured == ["a"]
            assert "a had llama loaded while it was measured" in questions.notes[0]
        reply = model.generate(checkpoint.prompt(5), max_new_tokens=4)
        assert list(reply.token_ids) == expected


def test_a_peer_with_too_little_memory_is_not_measured(
    questions: Questions, tmp_path: Path
) -> None:
    with Daemon(tmp_path, "--no-announce", "--name", "small", "--model-memory", "300KiB") as daemon:
        cluster = questions.ask(peers_of([daemon]))
    assert cluster.devices[0].rates is None
    (note,) = questions.notes
    assert note.startswith("small was not measured: ")
    assert "give the peer more --memory" in note


@pytest.mark.parametrize("moment", ["alone", "links"])
def test_a_peer_that_dies_meanwhile_is_named(
    moment: str, tmp_path: Path, questions: Questions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(passing_time.VARIABLE, passing_time.SHORT_DIAL)
    with start_together(
        lambda: Daemon(tmp_path / "a", "--no-announce", "--name", "a", *LITTLE),
        lambda: Daemon(tmp_path / "c", "--no-announce", "--name", "c", *LITTLE),
    ) as (other, victim):
        peers = peers_of([other, victim])

        def kill(event: Progress) -> None:
            is_it = event.peer == ("c" if moment == "alone" else "")
            if is_it and event.done == 0 and victim.process.poll() is None:
                victim.kill()

        with pytest.raises(PeerLostError) as raised:
            questions.ask(peers, on_progress=kill)
        assert raised.value.peer == "c"
        assert str(raised.value).startswith("peer c: ")
        (device,) = questions.ask(peers[:1]).devices
        assert device.rates is not None, "the other is none the worse"


@contextlib.asynccontextmanager
async def odd_peer(answers: dict[str, dict[str, Any]]) -> Any:
    """A peer that speaks the protocol, links to nobody, and answers calls with what it is told."""

    async def serve(channel: Channel) -> None:
        living = asyncio.create_task(show_life(channel))
        with contextlib.suppress(transport.TransportError):
            while True:
                frame = await channel.receive()
                if "call" in frame.header:
                    header = {**answers.get(frame.kind, {}), "call": frame.header["call"]}
                    await channel.send(Frame("ok", header))
        living.cancel()
        await asyncio.gather(living, return_exceptions=True)
        await channel.aclose()

    async def hang_up(link: transport.Link, _hello: object) -> None:
        link.close()

    listener = await transport.listen(
        "127.0.0.1:0",
        credentials=own_credentials(),
        hello={"name": "odd"},
        on_channel=serve,
        on_link=hang_up,
    )
    try:
        yield listener.addresses[0]
    finally:
        await listener.aclose()


def test_two_that_cannot_link_are_never_planned_together(
    pair: list[Daemon], questions: Questions
) -> None:
    (sound,) = peers_of(pair[:1])
    notes: list[str] = []
    known: dict[str, Any] = {}

    async def ask() -> ClusterSpec:
        client = await PeerClient.connect(sound.address, own_credentials())
        order = Profile(model=questions._spec, weight_format=FORMAT)
        known["profile"] = to_json(await client.call(order))
        known["describe"] = to_json(await client.call(Describe()))
        await client.aclose()
        async with odd_peer(known) as address:
            where = {"address": address, "reached_at": address, "addresses": (address,)}
            odd = replace(sound, id="odd", name="odd", host="other", **where)
            return await measured_cluster(
                [sound, odd], questions._spec, FORMAT, cache_root=questions.cache,
                on_note=notes.append,
            )  # fmt: skip

    cluster = asyncio.run(ask())
    assert [link.latency_s for link in cluster.links] == [NO_LINK_S, NO_LINK_S]
    (note,) = steady(notes)
    assert note.startswith("a and odd cannot share a model: peer a: odd")
    assert cluster.devices[1].rates is not None


@pytest.mark.parametrize(
    "answer",
    [{}, {"rates": {}}, {"rates": 5, "busy": [], "sample_bytes": 1}, {"busy": "everything"}],
    ids=str,
)
def test_a_peer_that_measures_in_nonsense_is_named(
    answer: dict[str, Any], pair: list[Daemon], questions: Questions
) -> None:
    (sound,) = peers_of(pair[:1])

    async def ask() -> None:
        async with odd_peer({"profile": answer}) as address:
            odd = replace(sound, id="odd", name="odd", address=address)
            await measured_cluster([odd], questions._spec, FORMAT, cache_root=questions.cache)

    with pytest.raises(
        ProtocolError, match="peer odd answers 'profile' in a form Edge does not know"
    ):
        asyncio.run(ask())


def refusal(daemon: Daemon, frame: Frame) -> str:
    """How the daemon refuses the call; it goes on to answer on the same connection."""

    async def send() -> str:
        channel = await transport.connect(
            daemon.address, credentials=own_credentials(), hello={"name": "test"}
        )
        try:
            await channel.send(frame)
            refused = await channel.receive()
            await channel.send(to_frame("describe", Describe(), call=2))
            assert (await channel.receive()).header["name"] == daemon.name
            return str(refused.header["message"])
        finally:
            await channel.aclose()

    return asyncio.run(send())


NOWHERE = Probe(
    place=Place(name="nowhere", addresses=("127.0.0.1:1",)), small_bytes=8, large_bytes=8
)
GLANCE = Glance(place=NOWHERE.place, small_bytes=8, large_bytes=8)


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (Frame("profile", {"call": 1}), "a malformed 'profile'"),
        (
            Frame("probe", {"call": 1, "place": {"name": "n", "addresses": [], "device": None}}),
            "a place needs 1",
        ),
        (to_frame("probe", NOWHERE, call=1), "cannot link to nowhere"),
        (Frame("glance", {"call": 1, "place": 5}), "a malformed 'glance'"),
        (to_frame("glance", GLANCE, call=1), "cannot link to nowhere"),
    ],
)
def test_orders_that_cannot_be_carried_out(pair: list[Daemon], frame: Frame, message: str) -> None:
    assert message in refusal(pair[0], frame)
