"""Which replies are compared with a prediction: those that ran alone, each once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from edge.partition import (
    ClusterSpec,
    ComputeRates,
    DeviceSpec,
    ModelFacts,
    Workload,
    choose,
)
from edge.planning.forecast import MOST_ANSWERS, Forecast
from edge.planning.proposal import Proposal
from edge.protocol.step import StepLimits
from edge.protocol.step_times import PeerTimes, StepTimes
from edge.protocol.wire_rules import WireRules
from edge.transport import WireRule
from tests.support.facts import changed_facts, plain_facts, plain_rates

MODEL = plain_facts(
    name="m",
    num_layers=2,
    hidden_size=8,
    num_heads=2,
    num_kv_heads=1,
    ffn_columns=16,
    vocab_size=10,
    tied_embeddings=False,
    column_multiple=1,
    query_head_bytes=64,
    kv_head_bytes=64,
    ffn_column_bytes=24,
    layer_bytes=16,
    embedding_row_bytes=8,
    head_row_bytes=8,
    kv_bytes_per_token=8,
)
RATES = plain_rates(
    (1, 4), (1e-6, 2e-6), attention_s=(1e-7, 1e-7), run_s=1e-5, sample_s=1e-5, step_s=1e-5
)
_ANY = Workload()
LENGTHS: dict[str, Any] = {"prompt_tokens": 5, "new_tokens": 4}
FIGURES: dict[str, Any] = {**LENGTHS, "first_token_s": 0.5, "decode_s": 1.5}


def proposal(
    rates: ComputeRates | None,
    model: ModelFacts = MODEL,
    *,
    memory_bytes: int = 1 << 20,
    workload: Workload = _ANY,
) -> Proposal:
    device = DeviceSpec(id="a", name="a", memory_bytes=memory_bytes, threads=1, rates=rates)
    cluster = ClusterSpec(devices=(device,))
    return Proposal(
        dtype="float32",
        weights="float32",
        choice=choose(model, cluster, workload, stream=True),
        model=model,
        cluster=cluster,
        workload=workload,
        limits=StepLimits(context_tokens=4096, chunk_tokens=4, requests=1, cached_tokens=4096),
        wire_rules=WireRules(sums=(WireRule(),), hops=()),
    )


def test_a_reply_is_predicted_for_its_own_lengths() -> None:
    forecast = Forecast(proposal(RATES))
    predicted = forecast.of(**LENGTHS)
    longer = forecast.of(**{**LENGTHS, "prompt_tokens": 50})
    assert predicted == forecast.proposal.predict(prompt_tokens=5, output_tokens=4)
    assert predicted is not None
    assert longer is not None
    assert longer.first_token_s > predicted.first_token_s


def test_experts_that_replies_found_in_memory_are_predicted_to_be_there() -> None:
    """Until the model runs by another plan."""
    experts, column = 40, 10**5
    model = changed_facts(
        MODEL, num_layers=4, num_experts=experts, top_k=2, expert_column_bytes=column,
        ffn_column_bytes=experts * column,
    )  # fmt: skip
    rates = replace(RATES, disk_bytes_per_s=1e6)
    made = proposal(rates, model, memory_bytes=model.kinds[0].ffn_columns * experts * column)
    forecast = Forecast(made)

    def token_s() -> float:
        predicted = forecast.of(**LENGTHS)
        assert predicted is not None
        return 1 / predicted.tokens_per_s

    def counted(wanted: float, read: float) -> PeerTimes:
        return PeerTimes(
            name="a", stage=0, rank=0, prompt=StepTimes(), resident_bytes=1, peak_bytes=1,
            decode=StepTimes(steps=2, experts=wanted, experts_read=read),
        )  # fmt: skip

    unknown_s = token_s()
    forecast.learn([counted(16, 4), counted(16, 0)])
    known_s = token_s()
    of_token = model.num_layers * 2 * model.kinds[0].ffn_columns * column
    forecast.learn([counted(0, 0)])
    assert token_s() == known_s
    forecast.learn([counted(16, 0)])
    assert known_s - token_s() == pytest.approx(of_token / 8 / 1e6)
    forecast.replace(made)
    assert token_s() == unknown_s > known_s


def test_memory_that_a_short_answer_leaves_unused_is_predicted_to_hold_weights() -> None:
    """Of the context that was planned for, as no room is kept for the answer alone."""
    many = changed_facts(MODEL, num_layers=8)
    layer_bytes = many.kinds[0].weight_bytes
    tokens = 4 * layer_bytes // (8 * many.kinds[0].kv_bytes_per_token)
    planned = Workload(prompt_tokens=tokens, output_tokens=0)
    rates = replace(RATES, disk_bytes_per_s=1e3)
    memory_bytes = 6 * layer_bytes + 8 * many.kinds[0].kv_bytes_per_token * tokens
    forecast = Forecast(proposal(rates, many, memory_bytes=memory_bytes, workload=planned))
    short = forecast.of(prompt_tokens=1, new_tokens=1)
    long = forecast.of(prompt_tokens=tokens - 1, new_tokens=1)
    assert short is not None
    assert long is not None
    assert short.token_s < 0.8 * long.token_s


def test_without_rates_nothing_is_predicted() -> None:
    forecast = Forecast(proposal(None))
    assert forecast.of(**LENGTHS) is None
    forecast.note(**FIGURES)
    assert forecast.take() == []


def test_a_reply_that_ran_alone_is_taken_once() -> None:
    forecast = Forecast(proposal(RATES))
    for _ in range(2):
        reply = forecast.begin()
        forecast.end(reply)
        forecast.end(reply)
        forecast.note(**FIGURES)
    first, second = forecast.take()
    assert first == second
    assert (first.new_tokens, first.first_token_s, first.decode_s) == (4, 0.5, 1.5)
    assert forecast.take() == []


def test_replies_that_nobody_asks_for_take_no_more_memory() -> None:
    forecast = Forecast(proposal(RATES))
    for new_tokens in range(2, 200):
        forecast.end(forecast.begin())
        forecast.note(**{**FIGURES, "new_tokens": new_tokens})
    found = [each.new_tokens for each in forecast.take()]
    assert found == list(range(200 - MOST_ANSWERS, 200))


@pytest.mark.parametrize("ends_first", [0, 1])
def test_replies_that_met_are_left_out_with_all_that_the_peers_counted_beside_them(
    ends_first: int,
) -> None:
    forecast = Forecast(proposal(RATES))
    replies = [forecast.begin(), forecast.begin()]
    forecast.end(replies[ends_first])
    forecast.note(**FIGURES)
    assert forecast.take() == []
    # The other one goes on: what the peers count from here on is in part its own.
    forecast.end(replies[1 - ends_first])
    forecast.note(**FIGURES)
    assert forecast.take() == []
    forecast.end(forecast.begin())
    forecast.note(**FIGURES)
    assert len(forecast.take()) == 1


def test_the_terms_of_an_answer_are_those_of_its_lengths() -> None:
    forecast = Forecast(proposal(RATES))
    forecast.end(forecast.begin())
    forecast.note(**{**FIGURES, "prompt_tokens": 1000})
    (answer,) = forecast.take()
    slower = forecast.proposal.predict(prompt_tokens=1000, output_tokens=4)
    assert answer.predicted == slower
