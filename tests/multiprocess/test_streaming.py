"""Replies token by token: left early, side by side, ended by a stop string, a token, a close."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import edge
from edge.partition import Plan
from tests.multiprocess.conftest import LONG_CONTEXT
from tests.support.checkpoints import TinyCheckpoint
from tests.support.plans import make_plan
from tests.support.processes import PATIENCE_S

CONTEXT = 160


@pytest.fixture(scope="module")
def cluster() -> Iterator[edge.Cluster]:
    with edge.Cluster.local(peers=3, threads=1) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint: Callable[..., TinyCheckpoint]) -> TinyCheckpoint:
    return tiny_checkpoint("llama")


def cut(checkpoint: TinyCheckpoint, layout: str) -> Plan:
    """By hand: so nothing is measured first."""
    return make_plan(checkpoint.spec, layout, model=checkpoint.path.name)


@pytest.fixture(scope="module", params=["pipeline_3", "tensor_3"])
def model(
    cluster: edge.Cluster, checkpoint: TinyCheckpoint, request: pytest.FixtureRequest
) -> Iterator[edge.Model]:
    plan = cut(checkpoint, request.param)
    with cluster.load(checkpoint.path, dtype="float32", plan=plan, context_tokens=CONTEXT) as model:
        yield model


def test_a_reply_left_early_makes_room_at_once(
    cluster: edge.Cluster, endless_checkpoint: TinyCheckpoint
) -> None:
    """Each reply may fill the whole context, so the next can only start once it is freed."""
    prompt = endless_checkpoint.prompt(4)
    expected = endless_checkpoint.greedy(prompt, 4)
    plan = cut(endless_checkpoint, "pipeline_3")
    with cluster.load(
        endless_checkpoint.path, dtype="float32", plan=plan, context_tokens=LONG_CONTEXT
    ) as model:
        for _ in range(5):
            seen = []
            for token in model.stream(prompt, max_new_tokens=LONG_CONTEXT - 4):
                seen.append(token.token_id)
                if len(seen) == 4:
                    break
            assert seen == expected
        with model.stream(prompt, max_new_tokens=LONG_CONTEXT - 4) as stream:
            assert next(stream).token_id == expected[0]
        assert list(stream) == []
        with pytest.raises(edge.RequestError, match="not finished"):
            stream.reply()
        assert list(model.generate(prompt, max_new_tokens=4).token_ids) == expected


@pytest.mark.linux_ways
def test_the_peers_memory_is_given_back(
    cluster: edge.Cluster, endless_checkpoint: TinyCheckpoint
) -> None:
    """KV pages of replies that were left early do not add up: those of twenty would be 40 MB. Eight
    are kept for prompts that begin alike, until others need the room."""

    def resident_bytes(model: edge.Model) -> int:
        return max(peer.resident_bytes for peer in model.measure())

    prompts = [endless_checkpoint.prompt(2000)]
    prompts += [[number, *prompts[0][1:]] for number in range(20)]
    plan = cut(endless_checkpoint, "solo")
    with cluster.load(
        endless_checkpoint.path, dtype="float32", plan=plan, context_tokens=LONG_CONTEXT
    ) as model:
        model.generate(prompts[0], max_new_tokens=2)
        before = resident_bytes(model)
        for prompt in prompts[1:]:
            with model.stream(prompt, max_new_tokens=5) as stream:
                next(stream)
        model.generate([1], max_new_tokens=1)
        assert resident_bytes(model) < before + (30 << 20)


def test_two_threads_get_the_right_tokens(model: edge.Model, checkpoint: TinyCheckpoint) -> None:
    prompts = [checkpoint.prompt(length) for length in (3, 40, 11, 25)]
    expected = [checkpoint.greedy(prompt, 30) for prompt in prompts]
    replies: dict[int, list[int]] = {}
    together = threading.Barrier(len(prompts))

    def ask(index: int) -> None:
        together.wait()
        for _ in range(3):
            reply = model.generate(prompts[index], max_new_tokens=30)
            replies.setdefault(index, []).extend(reply.token_ids)

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [replies[index] for index in range(len(prompts))] == [each * 3 for each in expected]


def test_more_requests_than_the_context_has_room_for_take_turns(
    model: edge.Model, checkpoint: TinyCheckpoint
) -> None:
    """Each may fill the context alone; those that came later wait and are then served."""
    prompts = [checkpoint.prompt(length) for length in (5, 6, 7)]
    streams = [model.stream(prompt, max_new_tokens=CONTEXT - 10) for prompt in prompts]
    for stream, prompt in zip(reversed(streams), reversed(prompts), strict=True):
        first = [token.token_id for token, _ in zip(stream, range(3), strict=False)]
        assert first == checkpoint.greedy(prompt, 3)
    for stream in streams:
        stream.close()


def test_a_reply_ends_by_its_length(model: edge.Model, checkpoint: TinyCheckpoint) -> None:
    prompt = checkpoint.prompt(CONTEXT - 3)
    tokens = list(model.stream(prompt, max_new_tokens=100))
    assert [token.token_id for token in tokens] == checkpoint.greedy(prompt, 3)
    assert [token.finish_reason for token in tokens] == [None, None, "length"]
    reply = model.generate(checkpoint.prompt(4), max_new_tokens=1)
    assert (len(reply.token_ids), reply.finish_reason) == (1, "length")


def test_a_stream_starts_without_waiting_for_the_loop(
    model: edge.Model, checkpoint: TinyCheckpoint
) -> None:
    """One hop: the caller leaves the request with the loop, and asks nothing of it."""
    started = threading.Event()
    in_time: list[bool] = []
    assert model._loop.submit(lambda: in_time.append(started.wait(PATIENCE_S)))
    prompt = checkpoint.prompt(4)
    stream = model.stream(prompt, max_new_tokens=5)
    started.set()
    assert [token.token_id for token in stream] == checkpoint.greedy(prompt, 5)
    assert in_time == [True]


def test_a_stop_string_is_never_shown(model: edge.Model) -> None:
    whole = model.generate("Tell me", max_new_tokens=40).text
    stop = whole[8:11]
    cut = whole[: whole.index(stop)]
    stream = model.stream("Tell me", max_new_tokens=40, stop=["never there", stop])
    assert "".join(token.text for token in stream) == cut
    reply = stream.reply()
    assert (reply.text, reply.finish_reason) == (cut, "stop")
    assert len(reply.token_ids) < 40


def test_an_end_token_ends_the_reply(
    cluster: edge.Cluster, checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    prompt = checkpoint.prompt(6)
    expected = checkpoint.greedy(prompt, 12)
    end = next(
        token for place, token in enumerate(expected) if token not in expected[:place] and place > 2
    )
    folder = Path(shutil.copytree(checkpoint.path, tmp_path / "ends"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [end, 127]}))
    plan = cut(TinyCheckpoint(folder), "pipeline_3")
    with cluster.load(folder, dtype="float32", plan=plan) as model:
        reply = model.generate(prompt, max_new_tokens=12)
        assert list(reply.token_ids) == expected[: expected.index(end) + 1]
        assert reply.finish_reason == "stop"


def test_closing_the_model_ends_replies_of_other_threads(
    cluster: edge.Cluster, endless_checkpoint: TinyCheckpoint
) -> None:
    plan = cut(endless_checkpoint, "tensor_3")
    model = cluster.load(
        endless_checkpoint.path, dtype="float32", plan=plan, context_tokens=LONG_CONTEXT
    )
    raised = generate_until_error(model, model.close)
    assert isinstance(raised, edge.RequestError)
    assert "the model is closed" in str(raised)
    with pytest.raises(edge.RequestError, match="the model is closed; load it again"):
        model.generate([1])
    model.close()


def test_closing_the_cluster_ends_replies_of_other_threads(
    endless_checkpoint: TinyCheckpoint,
) -> None:
    cluster = edge.Cluster.local(peers=2, threads=1)
    plan = cut(endless_checkpoint, "tensor_2")
    model = cluster.load(
        endless_checkpoint.path, dtype="float32", plan=plan, context_tokens=LONG_CONTEXT
    )
    raised = generate_until_error(model, cluster.close)
    assert isinstance(raised, edge.RequestError)
    cluster.close()
    model.close()
    for use in (lambda: model.generate([1]), lambda: cluster.load(endless_checkpoint.path)):
        with pytest.raises(edge.RequestError, match="closed"):
            use()


def test_closing_the_cluster_ends_a_load_of_another_thread(
    tiny_checkpoint: Callable[..., TinyCheckpoint],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EDGE_CACHE", str(tmp_path))
    cluster = edge.Cluster.local(peers=1, threads=1)
    loading = threading.Event()
    raised: list[BaseException] = []

    def load() -> None:
        try:
            cluster.load(
                tiny_checkpoint("llama").path, dtype="int8", progress=lambda _: loading.set()
            )
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=load)
    thread.start()
    loading.wait()
    cluster.close()
    thread.join()
    assert [type(error) for error in raised] in ([edge.RequestError], [])
    assert list(tmp_path.rglob("*.partial")) == []


def generate_until_error(model: edge.Model, close: Callable[[], None]) -> BaseException | None:
    """What a reply in another thread ends with, when `close` is called while it is under way."""
    raised: list[BaseException] = []
    under_way = threading.Event()

    def read() -> None:
        try:
            for _token in model.stream([1, 2], max_new_tokens=LONG_CONTEXT - 2):
                under_way.set()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    under_way.wait()
    close()
    thread.join()
    return raised[0] if raised else None


def test_a_stream_dropped_after_the_cluster_was_closed(
    endless_checkpoint: TinyCheckpoint,
) -> None:
    with edge.Cluster.local(peers=1, threads=1) as cluster:
        model = cluster.load(endless_checkpoint.path, dtype="float32", context_tokens=LONG_CONTEXT)
        stream = model.stream([1], max_new_tokens=LONG_CONTEXT - 1)
        next(stream)
    stream.close()
    del stream


def test_the_cluster_shows_what_is_loaded(
    cluster: edge.Cluster, checkpoint: TinyCheckpoint
) -> None:
    def loaded() -> list[int]:
        with edge.Cluster.connect(cluster.peers) as view:
            return [len(peer.models) for peer in view.peers]

    before = loaded()
    with cluster.load(checkpoint.path, dtype="float32", plan=cut(checkpoint, "pipeline_3")):
        assert loaded() == [count + 1 for count in before]
    assert loaded() == before
