"""What holds for every choice of a token, whatever the logits and parameters."""

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from edge.kernels.sampling.noise import gumbel_noise
from edge.kernels.sampling.parameters import SamplingParameters
from edge.kernels.sampling.reference import probabilities, sample

all_logits = hnp.arrays(
    np.float32,
    st.integers(1, 600),
    elements=st.floats(-100, 100, width=32) | st.sampled_from([0.0, 1.0, 2.0]),
)
all_parameters = st.builds(
    SamplingParameters,
    temperature=st.floats(0, 10),
    top_k=st.integers(0, 700),
    top_p=st.floats(0, 1),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0.01, 100),
    seed=st.integers(0, 2**64 - 1),
)


def penalised(logits: np.ndarray, history: list[int], parameters: SamplingParameters) -> np.ndarray:
    scores = logits.copy()
    for token in set(history):
        factor = np.float32(parameters.repetition_penalty)
        scores[token] = scores[token] * factor if scores[token] < 0 else scores[token] / factor
    return scores


def plain_probabilities(
    logits: np.ndarray, history: list[int], parameters: SamplingParameters
) -> tuple[list[int], np.ndarray]:
    """The module's formula by a full sort: the kept ids as ranked, and their chances."""
    scores = penalised(logits, history, parameters)
    ranked = sorted(range(scores.size), key=lambda i: (-scores[i], i))
    if parameters.temperature == 0:
        return ranked[:1], np.ones(1)
    if 0 < parameters.top_k < len(ranked):
        border = scores[ranked[parameters.top_k - 1]]
        ranked = [i for i in ranked if scores[i] >= border]
    best = float(scores[ranked[0]])
    distance = best - scores[ranked].astype(np.float64)
    with np.errstate(all="ignore"):
        weights = np.exp(-(distance / parameters.temperature))
    before = np.concatenate([[0.0], np.cumsum(weights)[:-1]])
    keep = np.ones(len(ranked), bool)
    if parameters.min_p > 0:
        keep = distance <= -math.log(parameters.min_p) * parameters.temperature
    if parameters.top_p < 1:
        keep &= (before < parameters.top_p * weights.sum()) | (np.arange(len(ranked)) == 0)
    kept = [i for i, stays in zip(ranked, keep, strict=True) if stays]
    return kept, weights[keep] / weights[keep].sum()


@given(all_logits, all_parameters, st.data())
@settings(max_examples=100)
def test_the_fast_choice_is_the_plain_formula(
    logits: np.ndarray, parameters: SamplingParameters, data: st.DataObject
) -> None:
    history = data.draw(st.lists(st.integers(0, logits.size - 1), max_size=8))
    position = data.draw(st.integers(0, 2**31 - 1))
    ranked, chances = plain_probabilities(logits, history, parameters)
    ours = probabilities(logits, history, parameters)
    # One token at the border of top-p may fall on either side: sums are rounded in another order.
    differing = np.setxor1d(np.flatnonzero(ours), np.array(ranked)[chances > 0])
    assert differing.size <= 1
    if differing.size == 0:
        np.testing.assert_allclose(ours[ranked], chances, rtol=1e-9, atol=1e-300)
    assert np.isclose(ours.sum(), 1.0)

    chosen = sample(logits, history=history, parameters=parameters, position=position)
    if parameters.temperature == 0:
        assert chosen == ranked[0]
    elif differing.size == 0:
        scores = penalised(logits, history, parameters)[ranked].astype(np.float64)
        noise = gumbel_noise(parameters.seed, position, np.array(ranked))
        # Times T: with a tiny one the quotients are infinite, and the ranking decides.
        sums = scores + parameters.temperature * noise
        assert sums[ranked.index(chosen)] >= sums.max() - 1e-9 * np.abs(sums).max()


@given(all_logits, all_parameters, st.integers(0, 2**31 - 1), st.integers(0, 2**32 - 1))
@settings(max_examples=100)
def test_the_last_bits_of_the_logits_hardly_ever_matter(
    logits: np.ndarray, parameters: SamplingParameters, position: int, noise_seed: int
) -> None:
    changes = np.random.default_rng(noise_seed).uniform(-1e-6, 1e-6, logits.size)
    parameters = SamplingParameters(temperature=1.0, seed=parameters.seed)
    sums = logits + gumbel_noise(parameters.seed, position, np.arange(logits.size))
    best = np.sort(sums)[-2:]
    if best[-1] - best[0] > 1e-4 or best.size == 1:
        chosen = [
            sample(values, history=[], parameters=parameters, position=position)
            for values in (logits, logits + changes.astype(np.float32))
        ]
        assert chosen[0] == chosen[1]


@given(st.permutations(range(12)), st.integers(0, 2**64 - 1))
@settings(max_examples=50)
def test_draws_do_not_depend_on_the_order_in_which_they_are_made(
    positions: list[int], seed: int
) -> None:
    logits = np.linspace(0, 1, 50, dtype=np.float32)
    parameters = SamplingParameters(temperature=1.0, seed=seed)

    def draw(position: int) -> int:
        return sample(logits, history=[], parameters=parameters, position=position)

    shuffled = {position: draw(position) for position in positions}
    assert [shuffled[position] for position in range(12)] == [draw(p) for p in range(12)]


@given(all_parameters)
def test_json_keeps_every_parameter(parameters: SamplingParameters) -> None:
    assert SamplingParameters.from_json(parameters.to_json()) == parameters
