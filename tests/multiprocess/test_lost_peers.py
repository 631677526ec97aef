"""A peer that is killed: the right name at once, and the others free and ready again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import edge
from demos.bundled import MODEL
from edge.partition import Plan
from edge.planning.load_options import Standby
from edge.protocol.client import PeerClient
from edge.protocol.step import Speculation
from edge.runs.peer_events import PeerEvents
from edge.runs.recovery import reloading
from edge.weights.formats import Dtype
from tests.multiprocess.conftest import LONG_CONTEXT
from tests.support.checkpoints import TinyCheckpoint, make_checkpoint
from tests.support.further_heads import add_further_head
from tests.support.plans import bundled_plan, make_plan
from tests.support.processes import PATIENCE_S, Daemon, edge_process, stopped
from tests.support.slow_cases import repeats_are_slow, shown_in_parts
from tests.support.small_disk import fill, small_disk

MANY_TOKENS = 200
"""Of an answer in whose middle a peer is lost: it takes longer than somebody needs who has read of
its beginning, some tens of which come at once, to kill one."""


class Trio:
    """Three daemons; one that was killed is started anew, on the cache it had."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with ThreadPoolExecutor(3) as pool:
            self.daemons = list(pool.map(self._start, range(3)))

    def __getitem__(self, index: int) -> Daemon:
        return self.daemons[index]

    def addresses(self) -> list[str]:
        return [daemon.address for daemon in self.daemons]

    def renew(self) -> None:
        for index, daemon in enumerate(self.daemons):
            if daemon.process.poll() is not None:
                daemon.close()
                self.daemons[index] = self._start(index)

    def close(self) -> None:
        for daemon in self.daemons:
            daemon.close()

    def _start(self, index: int) -> Daemon:
        return Daemon(self._folder / str(index), "--no-announce", "--name", f"peer-{index}")


@pytest.fixture(scope="module")
def three(
    tmp_path_factory: pytest.TempPathFactory, nothing_left_running_by_the_module: None
) -> Iterator[Trio]:
    trio = Trio(tmp_path_factory.mktemp("daemons"))
    yield trio
    trio.close()


@pytest.fixture
def all_alive(three: Trio) -> None:
    three.renew()


@pytest.fixture(autouse=True)
def nothing_left_running(all_alive: None, nothing_left_running: None) -> None:
    """The same check as everywhere, but after the daemons of the test before were renewed."""


@pytest.fixture
def trio(three: Trio) -> Iterator[Trio]:
    """All three alive at first, and empty and silent at the end."""
    yield three
    for daemon in three.daemons:
        assert daemon.messages == ""
        if daemon.process.poll() is None:
            daemon.await_free()


@pytest.fixture
def cluster(trio: Trio) -> Iterator[edge.Cluster]:
    with edge.Cluster.connect(trio.addresses()) as cluster:
        yield cluster


def cut(checkpoint: TinyCheckpoint, layout: str, daemons: Iterable[Daemon]) -> Plan:
    """By hand: so nothing is measured first."""
    names = [daemon.name for daemon in daemons]
    return make_plan(checkpoint.spec, layout, model=checkpoint.path.name, devices=names)


def check_survivors(
    cluster: edge.Cluster, trio: Trio, lost: int, checkpoint: TinyCheckpoint
) -> None:
    """They are empty, and together they load the model again and answer rightly."""
    survivors = [trio[index] for index in range(3) if index != lost]
    prompt = checkpoint.prompt(5)
    plan = cut(checkpoint, "pipeline_2", survivors)
    with cluster.load(checkpoint.path, dtype="float32", plan=plan, context_tokens=64) as model:
        assert {peer.name for peer in model.peers.values()} == {each.name for each in survivors}
        assert all(peer.models == () for peer in model.peers.values())
        reply = model.generate(prompt, max_new_tokens=5)
        assert list(reply.token_ids) == checkpoint.greedy(prompt, 5)
    for daemon in survivors:
        info = daemon.describe()
        assert info.models == ()
        assert info.free_bytes == info.memory_bytes - info.floor_bytes


@pytest.mark.parametrize(
    ("layout", "lost"),
    # Other tests lose the first of a pipeline.
    repeats_are_slow(
        [*product(["pipeline_3"], [2, 0, 1]), *product(["tensor_3"], [1, 2, 0])], of=[0]
    ),
)
def test_killed_while_generating(
    layout: str, lost: int, trio: Trio, cluster: edge.Cluster, endless_checkpoint: TinyCheckpoint
) -> None:
    """The reply goes on with the same tokens, and the model with other replies."""
    plan = cut(endless_checkpoint, layout, trio.daemons)
    prompt = endless_checkpoint.prompt(5)
    with cluster.load(
        endless_checkpoint.path, dtype="float32", plan=plan, context_tokens=LONG_CONTEXT
    ) as model:
        stream = model.stream(prompt, max_new_tokens=MANY_TOKENS)
        for _number in range(20):
            next(stream)
        trio[lost].kill()
        tokens = [token.token_id for token in stream]
        reply = stream.reply()
        assert len(tokens) == MANY_TOKENS - 20
        endless_checkpoint.check_greedy(prompt, reply.token_ids, MANY_TOKENS)
        (recovery,) = reply.recoveries
        assert "silent" not in recovery.reason, "its connections broke; nobody waited"
        assert recovery.reason.startswith(f"peer peer-{lost}: ")
        left = {f"peer-{index}" for index in range(3) if index != lost}
        assert {model.peers[device].name for device in model.plan.devices} <= left
        assert list(model.generate(prompt, max_new_tokens=5).token_ids) == list(reply.token_ids[:5])
        assert model.generate(prompt, max_new_tokens=5).recoveries == ()


@pytest.mark.parametrize(
    ("family", "layout", "speculate"),
    repeats_are_slow(
        [
            ("gpt_oss", "pipeline_3", "lookup"),
            ("lfm2", "tensor_2", "lookup"),
            ("qwen3_5", "pipeline_3", "lookup"),
            ("qwen3_5", "tensor_2", "off"),
        ],
        of=[1],
    ),
)
def test_states_are_computed_again(
    family: str,
    layout: str,
    speculate: Speculation,
    trio: Trio,
    cluster: edge.Cluster,
    tiny_checkpoint: Callable[..., TinyCheckpoint],
) -> None:
    """Of linear attention and of convolutions there are no copies, and none of windows behind long
    chunks: prompt and answer go through the model once more, in steps with guesses where there were
    some."""
    checkpoint = tiny_checkpoint(family)
    plan, prompt = cut(checkpoint, layout, trio.daemons), checkpoint.prompt(180)
    options = edge.LoadOptions(
        dtype="float32", context_tokens=180 + MANY_TOKENS, standby="kv", speculate=speculate
    )
    with cluster.load(checkpoint.path, options, plan=plan) as model:
        stream = model.stream(prompt, max_new_tokens=MANY_TOKENS)
        for _number in range(20):
            next(stream)
        trio[0].kill()
        tokens = [token.token_id for token in stream]
        reply = stream.reply()
        assert len(tokens) == MANY_TOKENS - 20
        checkpoint.check_greedy(prompt, reply.token_ids, MANY_TOKENS)
        assert len(reply.recoveries) == 1


def test_the_experts_of_a_lost_device_are_on_others(
    trio: Trio,
    cluster: edge.Cluster,
    tiny_checkpoint: Callable[..., TinyCheckpoint],
) -> None:
    """Where devices have experts as wholes."""
    checkpoint = tiny_checkpoint("mixtral")
    plan, prompt = cut(checkpoint, "whole tensor_3", trio.daemons), checkpoint.prompt(12)
    with cluster.load(
        checkpoint.path, dtype="float32", plan=plan, context_tokens=12 + MANY_TOKENS
    ) as model:
        stream = model.stream(prompt, max_new_tokens=MANY_TOKENS)
        for _number in range(12):
            next(stream)
        trio[1].kill()
        tokens = [token.token_id for token in stream]
        reply = stream.reply()
        assert len(tokens) == MANY_TOKENS - 12
        checkpoint.check_greedy(prompt, reply.token_ids, MANY_TOKENS)
        assert len(reply.recoveries) == 1


def test_a_further_head_is_lost_with_its_peer(
    trio: Trio, cluster: edge.Cluster, tmp_path: Path
) -> None:
    """Another peer loads it, and guesses on without the states of the tokens before."""
    checkpoint = make_checkpoint(tmp_path / "head", "glm4_moe", context_tokens=LONG_CONTEXT)
    add_further_head(checkpoint, alike=True)
    prompt, plan = checkpoint.prompt(9), cut(checkpoint, "pipeline_2", trio.daemons[:2])
    with cluster.load(
        checkpoint.path,
        dtype="float32",
        plan=plan,
        context_tokens=LONG_CONTEXT,
        speculate="mtp",
    ) as model:
        stream = model.stream(prompt, max_new_tokens=MANY_TOKENS, ignore_eos=True)
        for _number in range(12):
            next(stream)
        trio[1].kill()
        for _token in stream:
            pass
        reply = stream.reply()
        assert len(reply.recoveries) == 1
        checkpoint.check_greedy(prompt, reply.token_ids, MANY_TOKENS)
        assert reply.statistics["accepted_tokens"] > MANY_TOKENS / 4


def test_stopped_while_generating(
    trio: Trio,
    cluster: edge.Cluster,
    endless_checkpoint: TinyCheckpoint,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its connections stay open: the others wait for it in a sum, until its coordinator, which
    hears nothing, ends their sessions."""
    connect, to_stopped = PeerClient.connect, list[PeerClient]()

    async def connected(address: str, *given: Any, **options: Any) -> PeerClient:
        client = await connect(address, *given, **options)
        if address == trio[1].address:
            to_stopped.append(client)
        return client

    monkeypatch.setattr(PeerClient, "connect", connected)
    for limit in ("LOST_ANSWERS_WITHIN_S", "SAYS_WHAT_IT_KEEPS_WITHIN_S"):
        monkeypatch.setattr(reloading, limit, 0.2)  # for whom it does not answer
    plan = cut(endless_checkpoint, "tensor_3", trio.daemons)
    prompt = endless_checkpoint.prompt(5)
    with cluster.load(
        endless_checkpoint.path, dtype="float32", plan=plan, context_tokens=LONG_CONTEXT
    ) as model:
        stream = model.stream(prompt, max_new_tokens=MANY_TOKENS)
        next(stream)
        with stopped(trio[1].process):
            for client in to_stopped:  # of the others no silence counts, however busy they are
                client._hearing.silent_after_s = 0.3
            for _token in stream:
                pass
        reply = stream.reply()
        endless_checkpoint.check_greedy(prompt, reply.token_ids, MANY_TOKENS)
        assert reply.recoveries[0].reason.startswith("peer peer-1: it was silent for ")


class KillOnceCopied:
    """Ends a peer as soon as this number of an answer's tokens need not be computed again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, tokens: int) -> None:
        """For models that are loaded from now on; of their answers once there is a `lost`."""
        self.lost: Daemon | None = None
        self.spared = 0
        self._tokens = tokens
        for name in ("_on_kv_rows", "_on_tokens"):
            monkeypatch.setattr(PeerEvents, name, self._watched(getattr(PeerEvents, name)))

    def _watched(self, told: Callable[[PeerEvents, PeerClient, Any], None]) -> Any:
        def tell(reports: PeerEvents, client: PeerClient, event: Any) -> None:
            told(reports, client, event)
            for each in reports._answers:
                if self.lost is not None and each.copies is not None:
                    known = len(each.terms.prompt) + len(each.tokens) - 1
                    self.spared = each.copies.last(known) - len(each.terms.prompt)
                    if self.spared >= self._tokens:
                        self.lost.kill()
                        self.lost = None

        return tell


@pytest.mark.parametrize(
    ("layout", "dtype", "count", "standby", "is_spare", "speculate"),
    repeats_are_slow(
        [
            ("pipeline_2", "int8", 3, "none", True, "auto"),
            ("tensor_2", "int4", 3, "none", True, "auto"),
            ("tensor_2", "int8", 3, "kv", True, "auto"),
            ("pipeline_2", "int4", 1, "kv", True, "auto"),
            ("pipeline_2", "int4", 1, "auto", False, "auto"),
            ("pipeline_2", "int4", 3, "none", False, "auto"),
            ("tensor_2", "int4", 1, "kv", False, "auto"),
            ("tensor_2", "int8", 1, "none", True, "lookup"),
            ("pipeline_2", "int4", 1, "kv", False, "lookup"),
            ("tensor_2", "float32", 1, "auto", True, "lookup"),
        ]
    ),
)
def test_what_takes_a_lost_seat_has_the_same_bits(
    layout: str,
    dtype: Dtype,
    count: int,
    standby: Standby,
    is_spare: bool,
    speculate: Speculation,
    trio: Trio,
    cluster: edge.Cluster,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where another takes the lost seat, perhaps beside its own, even rounded products and the
    likelihoods of replies that were drawn are what they would have been: keys and values are made
    by the same steps. Layers may go to another stage for that."""
    plan = bundled_plan(layout, devices=[daemon.name for daemon in trio.daemons[:2]])
    options = edge.GenerationOptions(
        max_new_tokens=MANY_TOKENS,
        ignore_eos=True,
        temperature=0.9,
        repetition_penalty=1.2,
        logprobs=2,
        speculate=speculate,
    )
    prompts = ["The cat " * (1 + 4 * number) for number in range(count)]
    has_copies = standby != "none" and count == 1  # else several answers share steps
    copies = KillOnceCopied(monkeypatch, tokens=16)

    def replies(model: edge.Model, lost: Daemon | None) -> list[edge.Reply]:
        streams = [model.stream(prompt, options, seed=len(prompt)) for prompt in prompts]
        if has_copies:
            copies.lost = lost
        elif lost is not None:
            for _number in range(25):
                next(streams[-1])
            lost.kill()
        for stream in streams:
            for _token in stream:
                pass
        return [stream.reply() for stream in streams]

    with cluster.load(
        MODEL,
        dtype=dtype,
        plan=plan,
        context_tokens=256,
        concurrency=count,
        batch_invariant=count > 1,
        standby=standby,
    ) as model:
        undisturbed = replies(model, None)
        if not is_spare:
            trio[2].kill()
        found = replies(model, trio[1])
        assert len(model.recoveries) == 1
        names = {model.peers[device].name for device in model.plan.devices}
        assert names <= ({"peer-0", "peer-2"} if is_spare else {"peer-0"})
        assert len(model.plan.shares) == 2 or layout == "pipeline_2"
        if count == 1:
            times = model.measure()
            assert max(each.decode.steps for each in times) <= MANY_TOKENS - 1 - copies.spared
            # Tokens that came with guesses are computed again as a prompt is.
            if standby == "kv" and "drafted_tokens" not in found[0].statistics:
                assert not any(each.prompt.steps for each in times)
    for one, other in zip(undisturbed, found, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == other.logprobs, "to the last bit"


@pytest.mark.parametrize(
    "standby",
    ["kv", pytest.param("none", marks=shown_in_parts("multiprocess/test_lost_peers.py"))],
)
def test_latent_rows_come_from_copies_or_are_computed_again(
    standby: Standby,
    trio: Trio,
    cluster: edge.Cluster,
    tiny_checkpoint: Callable[..., TinyCheckpoint],
) -> None:
    """Each shard of a stage has them all, whichever heads it has."""
    checkpoint = tiny_checkpoint("deepseek_v3")
    plan, prompt = cut(checkpoint, "tensor_3", trio.daemons), checkpoint.prompt(150)
    options = edge.LoadOptions(
        dtype="float32", context_tokens=150 + MANY_TOKENS, standby=standby, speculate="lookup"
    )
    with cluster.load(checkpoint.path, options, plan=plan) as model:
        stream = model.stream(prompt, max_new_tokens=MANY_TOKENS)
        for _number in range(20):
            next(stream)
        trio[0].kill()
        for _token in stream:
            pass
        reply = stream.reply()
        assert len(reply.recoveries) == 1
    checkpoint.check_greedy(prompt, reply.token_ids, MANY_TOKENS)


def test_windows_come_back_from_copies(
    trio: Trio,
    cluster: edge.Cluster,
    tiny_checkpoint: Callable[..., TinyCheckpoint],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also behind many more tokens than they keep."""
    checkpoint = tiny_checkpoint("gemma3")
    plan, prompt = cut(checkpoint, "pipeline_2", trio.daemons[:2]), checkpoint.prompt(12)
    options = edge.GenerationOptions(
        max_new_tokens=MANY_TOKENS,
        ignore_eos=True,
        temperature=1.5,
        seed=3,
        logprobs=2,
        speculate="off",
    )
    copies = KillOnceCopied(monkeypatch, tokens=80)
    with cluster.load(
        checkpoint.path, dtype="float32", plan=plan, context_tokens=256, standby="kv"
    ) as model:
        undisturbed = model.generate(prompt, options)
        copies.lost = trio[1]
        found = model.generate(prompt, options)
        assert len(found.recoveries) == 1
        assert copies.spared >= 80
        times = model.measure()
        assert max(each.decode.steps for each in times) <= MANY_TOKENS - 1 - copies.spared
    assert found.token_ids == undisturbed.token_ids
    assert found.logprobs == undisturbed.logprobs, "to the last bit"


def test_who_has_the_weights_on_disk_is_a_better_stand_in(
    trio: Trio,
    cluster: edge.Cluster,
    endless_checkpoint: TinyCheckpoint,
) -> None:
    ids = {peer.name: peer.id for peer in cluster.peers}
    # The one that would not be taken by its id.
    has_it = max(trio.daemons[1:], key=lambda daemon: ids[daemon.name])
    load = partial(
        cluster.load, endless_checkpoint.path, dtype="float32", context_tokens=LONG_CONTEXT
    )
    with load(plan=cut(endless_checkpoint, "solo", [has_it])):
        pass
    prompt = endless_checkpoint.prompt(5)
    with load(plan=cut(endless_checkpoint, "solo", trio.daemons[:1])) as model:
        stream = model.stream(prompt, max_new_tokens=60)
        next(stream)
        trio[0].kill()
        for _token in stream:
            pass
        assert list(stream.reply().token_ids) == endless_checkpoint.greedy(prompt, 60)
        assert model.plan.devices == (ids[has_it.name],)
        assert not any(model.sent_bytes.values())


def test_whose_disk_is_full_has_no_part_in_going_on(
    trio: Trio,
    endless_checkpoint: TinyCheckpoint,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A spare that could stand in, if it could keep the weights: the survivor takes all."""
    plan = cut(endless_checkpoint, "tensor_2", trio.daemons[:2])
    prompt = endless_checkpoint.prompt(5)
    caplog.set_level("INFO", "edge.runs.recovery.reloading")
    with (
        small_disk(tmp_path / "disk", 8 << 20) as disk,
        Daemon(disk, "--no-announce", "--name", "full") as full,
        edge.Cluster.connect([*trio.addresses()[:2], full.address]) as cluster,
    ):
        fill(disk)
        with cluster.load(
            endless_checkpoint.path, dtype="float32", plan=plan, context_tokens=LONG_CONTEXT
        ) as model:
            stream = model.stream(prompt, max_new_tokens=60)
            next(stream)
            trio[1].kill()
            for _token in stream:
                pass
            reply = stream.reply()
            assert list(reply.token_ids) == endless_checkpoint.greedy(prompt, 60)
            assert [model.peers[each].name for each in model.plan.devices] == ["peer-0"]
    assert "more must be free on the disk" in caplog.text


@pytest.mark.parametrize("left", ["other bytes", "nothing"])
def test_weights_that_are_damaged_in_use_are_sent_again(
    left: str, trio: Trio, cluster: edge.Cluster, endless_checkpoint: TinyCheckpoint
) -> None:
    """On the disk of a peer that computes with them: no token comes of other bytes."""
    plan = cut(endless_checkpoint, "pipeline_2", trio.daemons)
    prompt = endless_checkpoint.prompt(5)
    with cluster.load(
        endless_checkpoint.path, dtype="float32", plan=plan, context_tokens=LONG_CONTEXT
    ) as model:
        stream = model.stream(prompt, max_new_tokens=MANY_TOKENS)
        next(stream)
        with stopped(trio[1].process):  # a disk may take longer than the answer
            for path in trio[1].shards.glob("*/weights"):
                with path.open("r+b") as file:
                    if left == "nothing":
                        file.truncate()
                    else:
                        file.write(bytes(path.stat().st_size))
        for _token in stream:
            pass
        reply = stream.reply()
        endless_checkpoint.check_greedy(prompt, reply.token_ids, MANY_TOKENS)
        assert "was written to while a model was computed from it" in reply.recoveries[0].reason
        assert trio[1].process.poll() is None
        assert all(path.stat().st_size for path in trio[1].shards.glob("*/weights"))


@pytest.mark.parametrize(("phase", "done"), [("hash", 0), ("send", 1), ("load", 0), ("load", 1)])
def test_killed_while_loading(
    phase: str,
    done: int,
    trio: Trio,
    cluster: edge.Cluster,
    tiny_checkpoint: Callable[..., TinyCheckpoint],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before anything was sent, after the first piece, before it loads, and when it has loaded."""
    checkpoint = tiny_checkpoint("llama", file_size=f"{100 + 10 * done + len(phase)}KB")
    monkeypatch.setenv("EDGE_CACHE", str(tmp_path))
    for shards in trio[1].shards.glob("[0-9a-f]*"):  # so that there is something to send
        for path in shards.iterdir():
            path.unlink()
        shards.rmdir()

    def kill(event: edge.Progress) -> None:
        is_it = (event.phase, event.peer) == (phase, "peer-1")
        if is_it and min(event.done, 1) == done and trio[1].process.poll() is None:
            trio[1].kill()

    plan = cut(checkpoint, "pipeline_3", trio.daemons)
    with pytest.raises(edge.PeerLostError) as raised:
        cluster.load(checkpoint.path, dtype="float32", plan=plan, progress=kill)
    assert "silent" not in str(raised.value), "its connections broke; nobody waited"
    assert raised.value.peer == "peer-1"
    check_survivors(cluster, trio, 1, checkpoint)


def test_the_last_survivor_is_alone(
    trio: Trio, cluster: edge.Cluster, tiny_checkpoint: Callable[..., TinyCheckpoint]
) -> None:
    """Two of three are gone before a load: the third serves; without it there is nobody."""
    checkpoint = tiny_checkpoint("llama")
    trio[0].kill()
    trio[2].kill()
    prompt = checkpoint.prompt(3)
    with cluster.load(checkpoint.path, dtype="float32", plan="pipeline") as model:
        assert [peer.name for peer in model.peers.values()] == ["peer-1"]
        assert list(model.generate(prompt, max_new_tokens=3).token_ids) == checkpoint.greedy(
            prompt, 3
        )
    trio[1].kill()
    with pytest.raises(edge.NetworkError, match="none of the cluster's peers answers any more"):
        cluster.load(checkpoint.path)


def test_who_has_gone_is_named_when_the_rest_is_too_small(
    trio: Trio, tmp_path: Path, tiny_checkpoint: Callable[..., TinyCheckpoint]
) -> None:
    checkpoint = tiny_checkpoint("llama")
    with (
        Daemon(tmp_path, "--no-announce", "--name", "small", "--model-memory", "300KiB") as small,
        edge.Cluster.connect([small.address, trio[0].address]) as cluster,
    ):
        trio[0].kill()
        with pytest.raises(edge.CapacityError) as raised:
            cluster.load(checkpoint.path, dtype="float32", context_tokens=64, stream="off")
    assert "'small'" in str(raised.value)
    assert "lacks" in str(raised.value)
    assert "(peer-0 no longer answers and was left out)" in str(raised.value)


def test_the_command_line_goes_on_and_tells_of_the_lost_peer(
    trio: Trio, endless_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    options = [part for address in trio.addresses() for part in ("--peer", address)]
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(cut(endless_checkpoint, "pipeline_3", trio.daemons).to_json()))
    with edge_process(
        "run", endless_checkpoint.path, "-p", "hi", "-n", 800, "--context", 900,
        "--dtype", "float32", "--plan", plan, *options,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.read(1)
        trio[2].kill()
        _out, messages = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    (told,) = [line for line in messages.splitlines() if "peer-2" in line]
    assert told.startswith("[peer peer-2: ")
    assert "the answer continued on peer-" in told


def test_all_lost(trio: Trio, cluster: edge.Cluster, endless_checkpoint: TinyCheckpoint) -> None:
    plan = cut(endless_checkpoint, "pipeline_3", trio.daemons)
    model = cluster.load(
        endless_checkpoint.path, dtype="float32", plan=plan, context_tokens=LONG_CONTEXT
    )
    stream = model.stream([1, 2, 3], max_new_tokens=LONG_CONTEXT - 3)
    next(stream)
    for daemon in trio.daemons:
        daemon.kill()
    with pytest.raises(edge.PeerLostError, match="none of the model's peers answers any more"):
        for _token in stream:
            pass
    with pytest.raises(edge.PeerLostError):
        model.generate([1])
