"""The choice of a token against the logits processors of `transformers`."""

import itertools
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from edge.kernels.sampling.noise import NOISE_SPREAD, gumbel_noise
from edge.kernels.sampling.parameters import SamplingParameters
from edge.kernels.sampling.reference import probabilities, sample


def reference_probabilities(
    logits: np.ndarray, history: list[int], parameters: SamplingParameters
) -> np.ndarray:
    """What `transformers` samples from, its processors in the order of `generate`."""
    processors = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(parameters.repetition_penalty),
            TemperatureLogitsWarper(parameters.temperature),
        ]
    )
    if parameters.top_k:
        processors.append(TopKLogitsWarper(parameters.top_k))
    if parameters.top_p < 1.0:
        processors.append(TopPLogitsWarper(parameters.top_p))
    if parameters.min_p:
        processors.append(MinPLogitsWarper(parameters.min_p))
    scores = processors(torch.tensor([history]), torch.from_numpy(logits.copy())[None])
    found: np.ndarray = torch.softmax(scores[0].double(), dim=-1).numpy()
    return found


GRID = [
    SamplingParameters(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=penalty
    )
    for temperature, top_k, top_p, min_p, penalty in itertools.product(
        (0.3, 1.0, 2.5), (0, 1, 7, 1000), (0.2, 0.9, 1.0), (0.0, 0.05, 0.9), (1.0, 1.3, 0.7)
    )
]


@pytest.mark.parametrize("spread", [0.05, 1.0, 8.0])
def test_probabilities_are_those_of_transformers(spread: float) -> None:
    generator = np.random.default_rng(int(spread * 100))
    for parameters in GRID:
        logits = (generator.normal(size=257) * spread).astype(np.float32)
        history = generator.integers(0, 257, size=40).tolist()
        ours = probabilities(logits, history, parameters)
        theirs = reference_probabilities(logits, history, parameters)
        assert np.array_equal(ours > 0, theirs > 0), parameters
        np.testing.assert_allclose(ours, theirs, rtol=2e-5 * max(1, spread), atol=1e-9)


def test_equal_scores_at_the_border_of_top_k_all_stay_as_in_transformers() -> None:
    logits = np.array([1, 3, 2, 2, 2, 0], dtype=np.float32)
    parameters = SamplingParameters(temperature=1.0, top_k=2)
    ours = probabilities(logits, [], parameters)
    np.testing.assert_array_equal(np.flatnonzero(ours), [1, 2, 3, 4])
    np.testing.assert_allclose(ours, reference_probabilities(logits, [0], parameters), atol=1e-7)


def test_equal_scores_at_the_border_of_top_p_are_taken_by_rising_id() -> None:
    ours = probabilities(
        np.zeros(1000, dtype=np.float32), [], SamplingParameters(temperature=1.0, top_p=0.25)
    )
    np.testing.assert_array_equal(np.flatnonzero(ours), np.arange(250))


def test_nearly_equal_scores_are_still_ranked_by_score_and_then_by_id() -> None:
    levels = np.random.default_rng(2).integers(0, 3, size=2000)
    logits = np.where(np.arange(2000) == 7, -60, levels * 0.001).astype(np.float32)
    ranking = np.lexsort((np.arange(2000), -logits))
    cumulative = np.cumsum(np.exp(logits[ranking].astype(np.float64)))
    for top_p in (0.1, 0.5, 0.9):
        parameters = SamplingParameters(temperature=1.0, top_p=top_p)
        kept = np.flatnonzero(probabilities(logits, [], parameters))
        count = int(np.searchsorted(cumulative, top_p * cumulative[-1])) + 1
        np.testing.assert_array_equal(kept, np.sort(ranking[:count]))


def test_greedy_takes_the_lowest_id_among_equal_maxima_as_torch_does() -> None:
    logits = np.array([1.0, 5.0, 5.0, -2.0, 5.0], dtype=np.float32)
    assert torch.argmax(torch.from_numpy(logits)) == 1
    assert sample(logits, history=[], parameters=SamplingParameters(), position=0) == 1
    np.testing.assert_array_equal(
        probabilities(logits, [], SamplingParameters()), [0.0, 1.0, 0.0, 0.0, 0.0]
    )


def test_greedy_applies_the_repetition_penalty_once_per_token() -> None:
    logits = np.array([4.0, 3.0, -1.0, 2.9], dtype=np.float32)
    parameters = SamplingParameters(repetition_penalty=1.5)
    assert sample(logits, history=[0, 0, 0], parameters=parameters, position=3) == 1
    assert sample(logits, history=[0, 1], parameters=parameters, position=2) == 3
    assert sample(logits, history=[0, 1, 3], parameters=parameters, position=3) == 0
    assert logits[0] == 4.0, "the caller's logits stay as they are"


@pytest.mark.parametrize(
    "parameters",
    [
        SamplingParameters(temperature=1.0),
        SamplingParameters(temperature=0.8, top_k=6),
        SamplingParameters(temperature=1.4, top_p=0.8, repetition_penalty=1.2),
        SamplingParameters(temperature=1.0, min_p=0.2, top_k=10, top_p=0.95),
    ],
)
def test_draws_follow_the_probabilities(parameters: SamplingParameters) -> None:
    logits = np.linspace(-2, 2, 16, dtype=np.float32)[np.random.default_rng(5).permutation(16)]
    history, draws = [3, 9, 12], 4000
    chances = probabilities(logits, history, parameters)
    counts = np.bincount(
        [
            sample(logits, history=history, parameters=parameters, position=position)
            for position in range(draws)
        ],
        minlength=16,
    )
    assert np.all(counts[chances == 0] == 0)
    deviation = np.sqrt(draws * chances * (1 - chances))
    assert np.all(np.abs(counts - draws * chances) <= 4 * deviation + 1)


def test_the_token_with_the_largest_sum_of_score_and_noise_is_drawn() -> None:
    logits = np.random.default_rng(3).normal(size=50_000).astype(np.float32) * 4
    ids = np.arange(logits.size)
    for temperature in (0.2, 0.9, 3.0):
        parameters = SamplingParameters(temperature=temperature, seed=11)
        for position in range(10):
            sums = logits.astype(np.float64) / temperature + gumbel_noise(11, position, ids)
            got = sample(logits, history=[], parameters=parameters, position=position)
            assert got == np.argmax(sums)


def test_no_two_noises_are_farther_apart_than_is_counted_on() -> None:
    """The extremes of 52 bits and a half, as `gumbel_noise` makes them."""
    extremes = -np.log(-np.log((np.array([0, 2**52 - 1]) + 0.5) * 2.0**-52))
    assert 40 < extremes[1] - extremes[0] < NOISE_SPREAD


def test_equal_scores_are_drawn_alike_however_small_the_temperature() -> None:
    logits = np.array([7.0, 3.0, 7.0, 7.0], dtype=np.float32)
    parameters = SamplingParameters(temperature=1e-300)
    drawn = [
        sample(logits, history=[], parameters=parameters, position=position)
        for position in range(900)
    ]
    counts = np.bincount(drawn, minlength=4)
    assert counts[1] == 0
    assert np.all(np.abs(counts[[0, 2, 3]] - 300) < 4 * np.sqrt(900 * 1 / 3 * 2 / 3))


def test_the_noise_never_changes_between_versions() -> None:
    pinned = {
        (0, 0, 0): 0.8509171899612384,
        (0, 1, 0): -0.25193192759912103,
        (0, 0, 1): 1.0357928357330763,
        (2**64 - 1, 7, 150_000): -0.4305101060151271,
        (42, 2**64 - 1, 2**31 - 1): 0.3208258457701163,
    }
    for (seed, position, token), noise in pinned.items():
        assert gumbel_noise(seed, position, np.array([token]))[0] == pytest.approx(noise, rel=1e-12)


def test_the_noise_is_spread_as_gumbel_says_and_differs_by_seed_position_and_id() -> None:
    ids = np.arange(1000)
    noise = np.stack([gumbel_noise(s, p, ids) for s in range(10) for p in range(10)])
    assert np.unique(noise).size == noise.size
    shares = np.exp(-np.exp(-noise))  # the distribution function: these are spread evenly
    counts = np.histogram(shares, bins=100, range=(0, 1))[0]
    # Chi-square with 99 degrees of freedom: above 160 once in 10,000 times, if it were random.
    assert np.sum((counts - 1000.0) ** 2 / 1000.0) < 160
    for lag in (
        shares[:, 1:] * shares[:, :-1],
        shares[1:] * shares[:-1],
        shares[10:] * shares[:-10],
    ):
        assert abs(lag.mean() - 0.25) < 0.004


@pytest.mark.parametrize("temperature", [1e-300, 1e-6, 1e6, 1e300])
def test_extreme_temperatures_stay_distributions(temperature: float) -> None:
    logits = np.array([-3e38, 0.0, 1.0, 3e38], dtype=np.float32)
    parameters = SamplingParameters(temperature=temperature, top_p=0.9)
    chances = probabilities(logits, [], parameters)
    assert np.isclose(chances.sum(), 1.0)
    assert chances[sample(logits, history=[], parameters=parameters, position=0)] > 0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_are_refused(bad: float) -> None:
    logits = np.array([0.0, bad, 1.0], dtype=np.float32)
    for parameters in (SamplingParameters(), SamplingParameters(temperature=1.0)):
        with pytest.raises(ValueError, match=r"1 of 3 logits are NaN or infinite.*checkpoint"):
            sample(logits, history=[], parameters=parameters, position=0)


@pytest.mark.parametrize("shape", [(0,), (2, 3), ()])
def test_logits_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"shape \(vocab,\)"):
        probabilities(np.zeros(shape, dtype=np.float32), [], SamplingParameters())


@pytest.mark.parametrize("history", [[0, 4], [-1]])
def test_a_history_outside_the_vocabulary_is_refused(history: list[int]) -> None:
    parameters = SamplingParameters(repetition_penalty=1.1)
    with pytest.raises(ValueError, match="outside the vocabulary of 4"):
        sample(np.zeros(4, np.float32), history=history, parameters=parameters, position=0)


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", 10**400),
        ("temperature", "1"),
        ("temperature", True),
        ("top_k", -1),
        ("top_k", 1.0),
        ("top_k", False),
        ("top_p", 1.01),
        ("top_p", -0.01),
        ("min_p", 2),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e9),
        ("seed", -1),
        ("seed", 2**64),
    ],
)
def test_a_parameter_out_of_range_is_named_with_its_range(field: str, bad: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{field} must be a .*number of at least"):
        SamplingParameters(**{field: bad})
    with pytest.raises(ValueError, match=rf"^{field} must be"):
        SamplingParameters.from_json({field: bad})


def test_a_position_out_of_range_is_refused() -> None:
    parameters = SamplingParameters(temperature=1.0)
    with pytest.raises(ValueError, match=r"^position must be"):
        sample(np.zeros(4, np.float32), history=[], parameters=parameters, position=-1)


def test_json_round_trip() -> None:
    parameters = SamplingParameters(
        temperature=0.7, top_k=40, top_p=0.9, min_p=0.01, repetition_penalty=1.1, seed=2**64 - 1
    )
    assert SamplingParameters.from_json(json.loads(json.dumps(parameters.to_json()))) == parameters
    assert SamplingParameters.from_json({}) == SamplingParameters()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1], "must be an object of numbers, not list"),
        (None, "must be an object of numbers"),
        ({"temprature": 1.0}, "unknown sampling parameter temprature; known are "),
        ({3: 1.0}, "unknown sampling parameter 3"),
    ],
)
def test_json_of_another_kind_is_refused(value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParameters.from_json(value)


@pytest.mark.parametrize(
    "parameters",
    [
        SamplingParameters(temperature=0.7, top_k=50, top_p=0.9),
        SamplingParameters(temperature=1.0, top_p=0.95),
        SamplingParameters(temperature=1.0),
    ],
)
def test_a_large_flat_vocabulary_is_never_sorted(
    parameters: SamplingParameters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundredth of it at most: sorting all is what costs most."""
    logits = np.random.default_rng(1).normal(size=150_000).astype(np.float32)
    sizes = [0]

    def counted(sort: Callable[..., Any]) -> Callable[..., Any]:
        def count(values: Any, *arguments: Any, **options: Any) -> Any:
            sizes.append(np.size(values))
            return sort(values, *arguments, **options)

        return count

    for name in ("argsort", "lexsort", "sort"):
        monkeypatch.setattr(np, name, counted(getattr(np, name)))
    for position in range(8):
        sample(logits, history=[1, 2], parameters=parameters, position=position)
    assert max(sizes) <= logits.size / 100
