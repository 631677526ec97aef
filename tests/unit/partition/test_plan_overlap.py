"""What sums cost that hide behind products, against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edge.backends.overlap import MIN_TOKENS
from edge.partition import ComputeRates, Workload, estimate
from edge.partition.cost.message_times import Network
from edge.partition.cost.overlap import SHOWN_BYTE_S, segment_s, stage_sum_s
from edge.partition.cost.pace import HALVED_TOKENS, Phase, chunk_phase, decode_phase
from tests.unit.partition.test_plan_cost import CHAIN, MODEL, RATES, SPLIT, cluster

PROMPT = Workload(prompt_tokens=256, output_tokens=1)
CHUNK, _ = chunk_phase(PROMPT, 256)


def rates(seconds_per_byte: float) -> ComputeRates:
    times = (seconds_per_byte, seconds_per_byte)
    return replace(
        RATES,
        seconds_per_byte=times,
        shared_seconds_per_byte=times,
        slice_seconds_per_byte=times,
    )


FAST, SLOW = rates(1e-6), rates(3e-6)
# 130 bytes of a layer beside its norms; 256 rows x 1000 numbers x 4 bytes.
SUM_BYTES = 1_024_000


def shown_s(bytes_per_s: float, *, phase: Phase = CHUNK) -> float:
    devices = cluster(FAST, SLOW, bytes_per_s=bytes_per_s)
    return stage_sum_s(Network(devices), MODEL, devices.devices, phase)


def test_the_planner_and_the_back_ends_agree_on_what_is_long() -> None:
    assert HALVED_TOKENS == MIN_TOKENS


@pytest.mark.parametrize(
    ("prompt_tokens", "chunk_tokens", "in_halves"),
    [(255, 256, False), (256, 256, True), (300, 256, True), (1000, 128, False)],
)
def test_long_chunks_are_computed_in_halves(
    prompt_tokens: int, chunk_tokens: int, in_halves: bool
) -> None:
    workload = Workload(prompt_tokens=prompt_tokens, output_tokens=1)
    assert chunk_phase(workload, chunk_tokens)[0].in_halves is in_halves
    assert not decode_phase(workload).in_halves


def test_a_segment_is_half_a_layer_shared_by_speed() -> None:
    """Together they read 1e6 x (1 + 1/3) bytes a second."""
    devices = cluster(FAST, SLOW).devices
    assert segment_s(MODEL, devices, CHUNK) == pytest.approx(130 / 2 / (1e6 * 4 / 3))


def test_of_a_sum_shows_what_is_longer_than_the_segment() -> None:
    segment = 130 / 2 / (1e6 * 4 / 3)
    assert shown_s(SUM_BYTES / 1.0) == pytest.approx(1.0 - segment)
    assert shown_s(SUM_BYTES / (segment + 0.004)) == pytest.approx(0.004)


def test_of_a_hidden_sum_shows_its_arithmetic() -> None:
    least_s = SUM_BYTES * SHOWN_BYTE_S
    assert shown_s(SUM_BYTES / (2 * least_s)) == pytest.approx(2 * least_s - 130 / 2 / (4e6 / 3))
    assert shown_s(SUM_BYTES / (least_s + 1e-6)) == pytest.approx(least_s)
    assert shown_s(1e12) == pytest.approx(SUM_BYTES / 1e12), "never more than the sum itself"


def test_a_short_chunk_shows_all_of_its_sums() -> None:
    phase, _ = chunk_phase(Workload(prompt_tokens=100, output_tokens=1), 256)
    assert shown_s(400_000.0, phase=phase) == pytest.approx(1.0)


def test_the_first_token_of_a_split_model_comes_sooner_by_what_is_hidden() -> None:
    """Three layers: six sums, and that of the embeddings."""
    network = cluster(FAST, FAST, bytes_per_s=SUM_BYTES / 1.0)
    whole = estimate(SPLIT, MODEL, network, PROMPT, chunk_tokens=256).first_token_s
    short = Workload(prompt_tokens=255, output_tokens=1)
    shown = estimate(SPLIT, MODEL, network, short, chunk_tokens=256).first_token_s
    hidden_s = 7 * segment_s(MODEL, network.devices[:2], CHUNK)
    assert shown - whole == pytest.approx(hidden_s - 7 / 256, abs=1e-4)
    chain = estimate(CHAIN, MODEL, network, PROMPT, chunk_tokens=256).first_token_s
    assert chain == pytest.approx(1.0, abs=0.01), "a hop is not a sum"
