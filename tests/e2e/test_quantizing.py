"""`edge quantize` over real daemons: what it writes is closer than plain rounding, and runs."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

import edge
from edge.demos.bundled import MODEL
from edge.demos.corpus import story
from edge.demos.world import PEOPLE
from edge.host import block_kernels
from edge.progress import Progress
from edge.weights.checkpoint import Checkpoint
from edge.weights.formats import AS_STORED
from edge.weights.partial_folder import PartialFolder
from tests.support.checkpoints import TinyCheckpoint
from tests.support.plans import bundled_plan, make_plan
from tests.support.processes import PATIENCE_S, edge_process, poll_until
from tests.support.processes import edge as run_edge
from tests.support.slow_cases import shown_in_parts

WINDOWS, WINDOW_TOKENS = 5, 64
READ: dict[str, Any] = {"windows": 3, "window_tokens": 192}
"""Of a text, to tell how good the result is."""

FEW: dict[str, Any] = {"windows": 4, "window_tokens": 16}
"""Where the weights are random, and how good the result is, is not asked."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[edge.Cluster]:
    with edge.Cluster.local(2, threads=1) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def one(cluster: edge.Cluster) -> Iterator[edge.Cluster]:
    """A single peer, which need not be measured."""
    with edge.Cluster.connect(cluster.peers[:1]) as one:
        yield one


@pytest.fixture(scope="module")
def small(tiny_checkpoint: Callable[..., TinyCheckpoint]) -> Path:
    """A model that is quantised in a moment."""
    return tiny_checkpoint("llama").path


@pytest.fixture(scope="module")
def known_text() -> str:
    """What the bundled model was taught on."""
    random = Random(2)
    return "\n\n".join(story(person, random) for _ in range(12) for person in PEOPLE)


@pytest.fixture(scope="module")
def made(cluster: edge.Cluster, tmp_path_factory: pytest.TempPathFactory) -> edge.Quantized:
    """By what the model writes itself, by a plan of two shards."""
    out = tmp_path_factory.mktemp("quantised") / "smaller"
    return cluster.quantize(
        MODEL,
        out,
        edge.LoadOptions(plan=bundled_plan("tensor_2")),
        progress=False,
        windows=WINDOWS,
        window_tokens=WINDOW_TOKENS,
    )


def test_less_is_lost_than_by_rounding_alone(
    one: edge.Cluster, made: edge.Quantized, known_text: str
) -> None:
    plain = one.quality(MODEL, dtype="int4", text=known_text, progress=False, **READ)
    found = one.quality(made.path, against=MODEL, text=known_text, progress=False, **READ)
    assert found.measured.format == f"{AS_STORED}, fast"
    assert found.measured.bytes_per_weight <= plain.measured.bytes_per_weight
    assert found.measured.bytes_per_weight == made.bytes_per_weight
    assert found.measured.mean_kl < 0.75 * plain.measured.mean_kl


@pytest.mark.parametrize(
    "layout",
    ["tensor_2", pytest.param("pipeline_2", marks=shown_in_parts("e2e/test_packed_folders.py"))],
)
def test_every_plan_runs_it_alike(cluster: edge.Cluster, made: edge.Quantized, layout: str) -> None:
    with Checkpoint.open(made.path) as checkpoint:
        spec, form = checkpoint.spec, edge.LoadOptions().weight_format(checkpoint)
        assert checkpoint.end_ids
        prompt = checkpoint.tokenizer.encode("Where does Ada live?")
    multiple = form.recipe.column_multiple({"down.weight"})
    plan = make_plan(spec, layout, model=made.path.name, column_multiple=multiple)
    with cluster.load(made.path, plan=plan, accuracy="high") as model:
        reply = model.generate(prompt, max_new_tokens=12)
    with cluster.load(
        made.path, plan=make_plan(spec, "solo", model=made.path.name), accuracy="high"
    ) as one:
        assert one.generate(prompt, max_new_tokens=12).token_ids == reply.token_ids


def test_bits_go_where_they_pay(one: edge.Cluster, known_text: str, tmp_path: Path) -> None:
    """More bits lose less, and no more are taken than were given; by a text that is read."""
    seen: list[Progress] = []
    losses = []
    for bits in (4.6, 6.5):
        out = tmp_path / f"{bits}"
        made = one.quantize(
            MODEL,
            out,
            bits=bits,
            text=known_text,
            progress=seen.append,
            windows=WINDOWS,
            window_tokens=WINDOW_TOKENS,
        )
        assert 0.9 * bits < 8 * made.bytes_per_weight <= bits
        found = one.quality(out, against=MODEL, text=known_text, progress=False, **READ)
        losses.append(found.measured.mean_kl)
    assert losses[1] < losses[0]
    # What the text told is known the second time.
    observed = [event for event in seen if event.phase == "observe"]
    assert [event.done for event in observed] == list(range(1, WINDOWS + 1))


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"bits": 1.5}, r"1\.5 bits a weight are fewer .* least, [34]\.[0-9]+"),
        (
            {"bits": 1.5, "options": edge.LoadOptions(packs_blocks=True)},
            r"1\.5 bits a weight are fewer .* least, 2\.[0-9]+",
        ),
        ({"bits": -1}, "bits must be a number up to 16, not -1"),
        ({"window_tokens": 2048}, r"windows of 2048 tokens do not fit .* context of [0-9]+; give"),
        ({"text": "Short."}, "the text has [0-9]+ tokens"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_loaded(
    one: edge.Cluster,
    wanted: dict[str, Any],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EDGE_CACHE", str(tmp_path / "cache"))
    with pytest.raises(edge.RequestError, match=message):
        one.quantize(MODEL, tmp_path / "out", progress=False, **wanted)
    assert not list(tmp_path.iterdir())


def test_an_interrupted_one_is_gone_on_with(
    one: edge.Cluster, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the form in which it was begun, also where it would begin in another now."""

    class InterruptionError(Exception):
        pass

    made = one.quantize(small, tmp_path / "whole", progress=False, **FEW)
    out, total = tmp_path / "out", 0

    def interrupt(event: Progress) -> None:
        nonlocal total
        assert event.phase == "quantise", "the model's inputs are known"
        total = event.total
        if event.done > event.total // 2:
            raise InterruptionError

    with pytest.raises(InterruptionError):
        one.quantize(small, out, progress=interrupt, **FEW)
    assert not out.exists()
    partial = out.with_name("out.partial")
    written = {file: file.stat().st_mtime_ns for file in partial.glob("*.safetensors")}
    assert written
    seen: list[Progress] = []
    monkeypatch.setattr(block_kernels, "library", lambda: None)
    one.quantize(small, out, progress=seen.append, **FEW)
    monkeypatch.undo()
    assert 0 < seen[0].done < total
    assert [event.done for event in seen] == sorted(event.done for event in seen)
    assert seen[-1].done == total
    assert not partial.exists()
    for file, when in written.items():
        assert (out / file.name).stat().st_mtime_ns == when
    for file in made.path.glob("*.safetensors"):
        assert file.read_bytes() == (out / file.name).read_bytes()


def test_what_is_there_is_left_alone(one: edge.Cluster, tmp_path: Path) -> None:
    with pytest.raises(edge.RequestError, match="is there already; remove it"):
        one.quantize(MODEL, tmp_path, progress=False)
    others = tmp_path / "out.partial"
    others.mkdir()
    (others / "letter.partial").write_text("of somebody")
    with pytest.raises(edge.RequestError, match="holds other files"):
        one.quantize(MODEL, tmp_path / "out", progress=False)
    assert (others / "letter.partial").exists()


def test_two_at_once_observe_once(
    cluster: edge.Cluster,
    small: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One waits for the other; and what was kept damaged is observed anew."""
    monkeypatch.setenv("EDGE_CACHE", str(tmp_path / "cache"))
    seen: list[Progress] = []

    async def quantize(peer: edge.PeerInfo, name: str) -> edge.Quantized:
        async with await edge.AsyncCluster.connect([peer]) as one:
            return await one.quantize(small, tmp_path / name, progress=seen.append, **FEW)

    async def both() -> list[edge.Quantized]:
        return await asyncio.gather(*map(quantize, cluster.peers, ("first", "second")))

    first, second = asyncio.run(both())
    done = [event.done for event in seen if event.phase == "observe" and event.done]
    assert len(done) == FEW["windows"] * (FEW["window_tokens"] - 1), "each token once"
    for file in first.path.glob("*.safetensors"):
        assert file.read_bytes() == (second.path / file.name).read_bytes()

    (kept,) = (tmp_path / "cache" / "statistics").glob("*/grams.safetensors")
    kept.write_bytes(kept.read_bytes()[:-1])
    seen.clear()
    asyncio.run(quantize(cluster.peers[0], "third"))
    assert max(event.done for event in seen if event.phase == "observe") == len(done)


@pytest.mark.parametrize("phase", ["observe", "quantise"])
def test_nothing_stays_behind_a_task_that_is_cancelled(
    one: edge.Cluster,
    small: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    phase: str,
) -> None:
    monkeypatch.setenv("EDGE_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "out"

    async def interrupted() -> None:
        loop = asyncio.get_running_loop()
        seen, cancelled = asyncio.Event(), threading.Event()
        phases: set[str] = set()

        def on_progress(event: Progress) -> None:
            phases.add(event.phase)
            if event.phase != phase or "observe" not in phases:
                return  # to load in int8 is to quantise, too
            loop.call_soon_threadsafe(seen.set)
            if phase == "quantise":  # in a thread, which cannot be cancelled
                assert cancelled.wait(PATIENCE_S)

        async with await edge.AsyncCluster.connect(one.peers) as cluster:
            work = asyncio.create_task(cluster.quantize(small, out, progress=on_progress, **FEW))
            await asyncio.wait(
                {work, asyncio.ensure_future(seen.wait())}, return_when=asyncio.FIRST_COMPLETED
            )
            if work.done():
                await work  # it has failed, and says why
            work.cancel()
            for _ in range(10):  # until the task knows of it
                await asyncio.sleep(0)
            cancelled.set()
            with pytest.raises(asyncio.CancelledError):
                await work

    asyncio.run(interrupted())
    assert not out.exists()
    kept = list((tmp_path / "cache" / "statistics").glob("*/*.safetensors*"))
    assert len(kept) == (phase == "quantise")
    assert out.with_name("out.partial").exists() == (phase == "quantise")
    with PartialFolder(out):  # nobody holds it any more
        pass
    made = one.quantize(small, out, progress=False, **FEW)
    assert made.path == out


@pytest.mark.parametrize("method", ["edge-blocks", "compressed-tensors"])
def test_random_weights_of_another_family(
    one: edge.Cluster,
    tiny_checkpoint: Callable[..., TinyCheckpoint],
    tmp_path: Path,
    method: str,
) -> None:
    """With biases, in bfloat16, without special tokens, and a head that is the embedding."""
    checkpoint = tiny_checkpoint("qwen2", stored_type="bfloat16")
    options = edge.LoadOptions(packs_blocks=method == "compressed-tensors")
    made = one.quantize(checkpoint.path, tmp_path / "out", options, progress=False, **FEW)
    config = json.loads((made.path / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == method
    with one.load(made.path, accuracy="high") as model:
        rows = model.logits(checkpoint.prompt(8))
    assert rows.shape == (8, checkpoint.spec.vocab_size)


SMALL = ("--windows", "2", "--window-tokens", "32", "--local", "1", "--threads", "1")


def test_the_command_line(tmp_path: Path, known_text: str, small: Path) -> None:
    text, out = tmp_path / "text", tmp_path / "out"
    text.write_text(known_text)
    done = run_edge("quantize", MODEL, "--out", out, "--calibrate", text, *SMALL, "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found.keys() == {"path", "num_bytes", "bytes_per_weight", "words"}
    assert found["path"] == str(out)
    assert found["num_bytes"] == sum(file.stat().st_size for file in out.glob("*.safetensors"))
    another = ("--compressed-tensors", "--out", tmp_path / "another")
    shown = run_edge("quantize", small, *another, *SMALL)
    assert shown.code == 0, shown.err
    assert "bits in blocks of 32" in shown.out
    again = run_edge("quantize", MODEL, "--out", out, *SMALL)
    assert again.code == 1
    assert "is there already" in again.err
    assert again.err.count("\n") == 1


def test_ctrl_c_while_it_writes(tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ("quantize", MODEL, "--out", out, "--windows", "64", "--local", "1")
    cache = tmp_path / "cache"
    with edge_process(*arguments, environment={"EDGE_CACHE": str(cache)}) as process:
        poll_until((cache / "statistics").exists)
        process.send_signal(signal.SIGINT)
        _out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, err
    assert not out.exists()
