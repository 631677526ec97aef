"""Layers that are read from disk for each token give the very logits that they give in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest

import edge
from edge.demos.bundled import MODEL
from edge.offload.cache.verified_shard import mark_intact
from edge.partition import Plan
from edge.planning.load_options import Streaming
from edge.weights.formats import weight_format
from tests.support.checkpoints import TinyCheckpoint
from tests.support.plans import bundled_plan, make_plan, streaming
from tests.support.slow_cases import every_pair, repeats_are_slow, shown_in_parts

pytestmark = pytest.mark.linux_ways

Checkpoints = Callable[..., TinyCheckpoint]

PROMPT_TOKENS = 24
NEW_TOKENS = 8


def answers(
    cluster: edge.Cluster, path: Path, plan: Plan, prompt: list[int], **options: object
) -> tuple[np.ndarray, tuple[int, ...]]:
    with cluster.load(path, plan=plan, context_tokens=128, **options) as model:  # type: ignore[arg-type]
        found = [model.logits(prompt), model.embed(prompt)]
        reply = model.generate(prompt, max_new_tokens=NEW_TOKENS, ignore_eos=True)
    return np.concatenate([each.ravel() for each in found]), reply.token_ids


@pytest.mark.parametrize(
    ("family", "layout", "dtype", "count"),
    repeats_are_slow(
        [
            ("qwen2_moe", "mixed_2_then_3", "int4", 1),  # a shard has a part of no layer there
            *(
                (*each, count)
                for count in (1, 4)
                for each in every_pair(
                    # qwen2: a window in half of its layers; qwen2_moe: experts, some of them shared
                    ["llama", "qwen2", "qwen3", "qwen2_moe"],
                    ["solo", "pipeline_2", "tensor_3", "mixed_2_then_3"],
                    ["float32", "int4"],
                )
            ),
        ]
    ),
)
def test_logits_are_those_of_layers_in_memory(
    five_peers: edge.Cluster,
    tiny_checkpoint: Checkpoints,
    family: str,
    layout: str,
    dtype: str,
    count: int,
) -> None:
    """Up to `count` layers of each shard. Bit for bit: the same kernels see the same weights."""
    checkpoint = tiny_checkpoint(family)
    plan = make_plan(
        weight_format(checkpoint.spec, dtype).graded(checkpoint.spec),
        layout,
        model=checkpoint.path.name,
        column_multiple=1 if dtype == "float32" else 32,
    )
    prompt = checkpoint.prompt(PROMPT_TOKENS)
    logits, tokens = answers(five_peers, checkpoint.path, plan, prompt, dtype=dtype)
    streamed = answers(five_peers, checkpoint.path, streaming(plan, count), prompt, dtype=dtype)
    assert np.array_equal(streamed[0], logits)
    assert streamed[1] == tokens


@pytest.mark.parametrize(
    "layout",
    ["tensor_2", pytest.param("pipeline_2", marks=shown_in_parts("e2e/test_streamed_layers.py"))],
)
def test_more_layers_than_slots_go_round_and_round(five_peers: edge.Cluster, layout: str) -> None:
    """And several requests share the steps, with codes in the KV cache."""
    prompts = [[5, 9, 2], [7] * 9, [3, 1, 4, 1, 5]]
    plan = bundled_plan(layout)
    found = []
    for each in (plan, streaming(plan, 6)):
        with five_peers.load(
            MODEL, plan=each, context_tokens=64, concurrency=3, kv_dtype="int8"
        ) as model:
            streams = [
                model.stream(prompt, max_new_tokens=NEW_TOKENS, ignore_eos=True)
                for prompt in prompts
            ]
            found.append([[token.token_id for token in stream] for stream in streams])
    assert found[0] == found[1]


def test_a_model_larger_than_memory_reads_layers_from_disk(
    five_peers: edge.Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """By itself, and says so; `off` refuses, and says that it could."""
    with five_peers.load(MODEL, plan=bundled_plan("solo"), context_tokens=64) as model:
        needed_bytes = model.proposal.rows[0].memory.total
        expected = model.generate("Once", max_new_tokens=NEW_TOKENS).token_ids
    with edge.Cluster.local(1, threads=1, model_memory=int(0.7 * needed_bytes)) as tight:
        with pytest.raises(edge.CapacityError, match='stream="auto"'):
            tight.load(MODEL, context_tokens=64, stream="off")
        assert caplog.messages == []
        wanted: list[tuple[int, Streaming]] = [(1, "auto"), (0, "on")]
        for told, stream in wanted:
            caplog.clear()
            with tight.load(MODEL, context_tokens=64, stream=stream) as model:
                ((shard,),) = (stage.slices for stage in model.plan.stages)
                assert shard.streamed_layers > 3
                assert model.proposal.rows[0].memory.total <= 0.7 * needed_bytes
                assert model.generate("Once", max_new_tokens=NEW_TOKENS).token_ids == expected
                streams = f"from disk for each token: {shard.streamed_layers} of 6 layers"
                assert sum(streams in message for message in caplog.messages) == told


def test_layers_stay_in_memory_that_no_step_uses() -> None:
    """What is kept for a long context holds all layers of this model while a reply is short; a
    longer prompt needs the room, and the tokens are those of layers that never left."""
    prompts = ["Once", "Once upon a time " * 95, "Where does the cat live?"]
    others = set(psutil.Process().children())
    with edge.Cluster.local(1, threads=1) as cluster:
        started = set(psutil.Process().children()) - others
        daemon = max(started, key=lambda each: each.create_time())
        plan = bundled_plan("solo")
        options = edge.LoadOptions(block_size=64, context_tokens=512, concurrency=1)
        with cluster.load(MODEL, options, plan=plan) as model:
            expected = [
                model.generate(each, max_new_tokens=20, ignore_eos=True).token_ids
                for each in prompts
            ]
        with cluster.load(MODEL, options, plan=streaming(plan, 6)) as model:
            (row,) = model.proposal.rows
            layer_bytes = row.memory.streamed_layer_bytes
            assert row.memory.streamed_bytes >= 5 * layer_bytes > 0
            for prompt, tokens in zip(prompts, expected, strict=True):
                before = daemon.io_counters().read_chars
                read: list[int] = []
                found: list[int] = []
                for token in model.stream(prompt, max_new_tokens=20, ignore_eos=True):
                    found.append(token.token_id)
                    read.append(daemon.io_counters().read_chars - before)
                assert tuple(found) == tokens
                if prompt == prompts[1]:
                    assert read[0] > 3 * layer_bytes
                else:
                    assert read[-1] - read[6] < layer_bytes


def test_a_model_that_fits_stays_in_memory(caplog: pytest.LogCaptureFixture) -> None:
    """The plan is Edge's own; for one peer nothing is measured first."""
    with (
        edge.Cluster.local(1, threads=1) as roomy,
        roomy.load(MODEL, context_tokens=64) as model,
    ):
        assert model.proposal.streaming is None
    assert caplog.messages == []


def test_too_little_even_to_stream_is_refused_with_what_that_takes() -> None:
    with (
        edge.Cluster.local(1, threads=1, model_memory=64 << 10) as tight,
        pytest.raises(edge.CapacityError) as raised,
    ):
        tight.load(MODEL, context_tokens=64, stream="on")
    told = str(raised.value)
    assert "Even with every layer read from disk" in told
    for part in ("read meanwhile", "for the head", "for norms", "64 tokens of keys and values"):
        assert part in told


def test_damaged_packed_weights_are_noticed_and_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGE_CACHE", str(tmp_path))
    with edge.Cluster.local(1, threads=1) as cluster:
        plan = streaming(bundled_plan("solo"), 6)

        def reply() -> edge.Reply:
            with cluster.load(MODEL, plan=plan, context_tokens=64) as model:
                return model.generate("Once", max_new_tokens=NEW_TOKENS)

        def answer() -> tuple[int, ...]:
            return reply().token_ids

        expected = answer()
        (packed,) = tmp_path.glob("packed/*/weights")
        content = bytearray(packed.read_bytes())
        middle = len(content) // 2
        weights = next(at for at in range(middle, len(content)) if content[at])  # not padding
        content[weights] ^= 1
        packed.write_bytes(content)
        assert answer() == expected, "somebody wrote to it: it is hashed, and made again"
        (packed,) = tmp_path.glob("packed/*/weights")
        packed.write_bytes(content)
        mark_intact(packed.parent)  # as a disk does that gives back other bytes than it was given
        mended = reply()
        assert mended.token_ids == expected
        (recovery,) = mended.recoveries
        assert "other bytes" in recovery.reason
        assert answer() == expected
