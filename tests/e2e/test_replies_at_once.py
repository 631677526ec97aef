"""Replies that share their steps are the replies each would have been alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from edge_kernels import kernels

import edge
from edge.protocol.step import Step
from edge.scheduling import next_step
from edge.scheduling.state import SchedulingState, StepUnderWay
from edge.studies.benchmark import BenchmarkOptions, run_benchmark
from tests.support.checkpoints import TinyCheckpoint
from tests.support.plans import make_plan
from tests.support.replies import replies_at_once

Checkpoints = Callable[..., TinyCheckpoint]


@pytest.mark.parametrize("layout", ["solo", "tensor_3"])
def test_replies_at_once_have_the_tokens_of_replies_alone(
    tiny_checkpoint: Checkpoints, five_peers: edge.Cluster, layout: str
) -> None:
    """More requests than room: some wait, some join while others run on by themselves."""
    checkpoint = tiny_checkpoint("llama")
    plan = make_plan(checkpoint.spec, layout, model=checkpoint.path.name)
    prompts = [checkpoint.prompt(length) for length in (5, 9, 3, 17, 1, 30, 8)]
    lengths = [40, 25, 33, 12, 40, 5, 18]
    expected = [
        checkpoint.greedy(prompt, length) for prompt, length in zip(prompts, lengths, strict=True)
    ]
    with five_peers.load(
        checkpoint.path, dtype="float32", plan=plan, context_tokens=64, concurrency=3
    ) as model:
        assert replies_at_once(model, prompts, lengths) == expected


@pytest.mark.skipif(kernels() == "plain", reason="this processor has no fast kernels: not run")
@pytest.mark.parametrize("layout", ["tensor_3", "pipeline_2"])
def test_prompts_that_are_read_beside_answers_change_no_token(
    tiny_checkpoint: Checkpoints,
    five_peers: edge.Cluster,
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
) -> None:
    """Four long prompts, once there is room. int4 as it is by default: in blocks of files."""
    steps: list[Step] = []
    hand_out = next_step._hand_out

    def noted(state: SchedulingState, step: Step) -> StepUnderWay:
        steps.append(step)
        return hand_out(state, step)

    monkeypatch.setattr(next_step, "_hand_out", noted)
    checkpoint = tiny_checkpoint("llama")
    plan = make_plan(checkpoint.spec, layout, model=checkpoint.path.name)
    prompts = [checkpoint.prompt(length) for length in (5, 3, 8, 40, 33, 38, 45)]
    lengths = [50, 55, 20, 9, 15, 20, 12]
    with five_peers.load(
        checkpoint.path, dtype="int4", plan=plan, context_tokens=64, concurrency=3, speculate="off"
    ) as model:
        expected = [
            replies_at_once(model, [prompt], [length])[0]
            for prompt, length in zip(prompts, lengths, strict=True)
        ]
        assert not any(step.is_mixed for step in steps)
        assert replies_at_once(model, prompts, lengths) == expected
    if layout == "tensor_3":  # stages have steps of their own while another computes
        assert any(step.is_mixed for step in steps)


def test_a_benchmark_accounts_for_every_peer(
    tiny_checkpoint: Checkpoints, five_peers: edge.Cluster
) -> None:
    checkpoint = tiny_checkpoint("llama")
    plan = make_plan(checkpoint.spec, "tensor_3", model=checkpoint.path.name)
    rates = five_peers.memory_rates()
    assert len(rates) == 5
    assert min(rates.values()) > 0
    with five_peers.load(
        checkpoint.path, dtype="int4", plan=plan, context_tokens=32, concurrency=2,
    ) as model:  # fmt: skip
        measured = run_benchmark(
            model,
            BenchmarkOptions(prompt_tokens=8, new_tokens=16, repeats=2, warm_ups=1, requests=2),
            memory_rates=rates,
        )
        assert [share.times.rank for share in measured.peers] == [0, 1, 2]
        for share in measured.peers:
            assert (share.times.prompt.steps, share.times.decode.steps) == (2, 2 * 15)
            assert 0 < share.times.resident_bytes <= share.times.peak_bytes
            assert share.token.compute_s > 0
        assert measured.peers[0].token.sample_s > 0
        assert measured.decode_tokens_per_s.p50 > 0
        assert measured.batch_tokens_per_s.p50 > 0
        model.measure()
        assert [each.decode.steps for each in model.measure()] == [0, 0, 0]
