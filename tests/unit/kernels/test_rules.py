"""Rules change logits as OpenAI's formula and the processors of transformers do."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

from edge.kernels.sampling.parameters import SamplingParameters
from edge.kernels.sampling.reference import probabilities, sample
from edge.kernels.sampling.rules import MASKED, apply_rules

LOGITS = np.random.default_rng(4).normal(0, 3, 40).astype(np.float32)
PROMPT, ANSWER = [3, 3, 17], [5, 39, 5, 5, 17]


def scores(parameters: SamplingParameters, first: int = 0, last: int = 40) -> np.ndarray:
    return apply_rules(
        LOGITS[first:last],
        parameters,
        history=PROMPT + ANSWER,
        prompt_tokens=len(PROMPT),
        first_id=first,
        vocab_size=40,
    )


def test_penalties_of_the_answer_are_those_of_openai() -> None:
    """mu[j] - c[j] * alpha_frequency - float(c[j] > 0) * alpha_presence"""
    counts = Counter(ANSWER)
    expected = [
        mu - counts[j] * 0.7 - float(counts[j] > 0) * -1.2 for j, mu in enumerate(LOGITS.tolist())
    ]
    found = scores(SamplingParameters(frequency_penalty=0.7, presence_penalty=-1.2))
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_bias_and_repetition_are_those_of_transformers_in_its_order() -> None:
    parameters = SamplingParameters(logit_bias={3: 4.0, 38: -100.0}, repetition_penalty=1.3)
    ids, rows = torch.tensor([PROMPT + ANSWER]), torch.from_numpy(LOGITS)[None]
    bias = [[[token], value] for token, value in parameters.logit_bias.items()]
    rows = SequenceBiasLogitsProcessor(bias)(ids, rows)
    rows = RepetitionPenaltyLogitsProcessor(1.3)(ids, rows)
    np.testing.assert_array_equal(scores(parameters), rows[0].numpy())


def test_parts_of_the_vocabulary_have_the_numbers_of_the_whole() -> None:
    parameters = SamplingParameters(
        logit_bias={3: 4.0, 38: -100.0},
        repetition_penalty=1.3,
        frequency_penalty=0.3,
        presence_penalty=0.2,
    )
    parts = [scores(parameters, *each) for each in ((0, 5), (5, 5), (5, 39), (39, 40))]
    np.testing.assert_array_equal(np.concatenate(parts), scores(parameters))


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 1e300])
@pytest.mark.parametrize("filters", [{}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_what_is_not_allowed_is_never_chosen(temperature: float, filters: dict[str, float]) -> None:
    allowed = [0, 11, 33]
    bits = np.zeros(40, np.uint8)
    bits[allowed] = 1
    packed = np.packbits(bits, bitorder="little")
    parameters = SamplingParameters(temperature=temperature, **filters)  # type: ignore[arg-type]
    drawn = {
        sample(LOGITS, history=[], parameters=parameters, position=position, allowed=packed)
        for position in range(60)
    }
    assert drawn <= set(allowed)
    if temperature <= 1.0:
        chances = probabilities(LOGITS, [], parameters, allowed=packed)
        assert set(np.flatnonzero(chances)) <= set(allowed)


def test_where_nothing_is_allowed_it_is_said() -> None:
    with pytest.raises(ValueError, match="no token is allowed here"):
        sample(
            LOGITS,
            history=[],
            parameters=SamplingParameters(),
            position=0,
            allowed=np.zeros(5, np.uint8),
        )


def test_scores_stay_finite() -> None:
    parameters = SamplingParameters(logit_bias={1: 3.4e38, 2: -3.4e38}, repetition_penalty=100.0)
    logits = np.array([0.0, 3e38, -3e38], np.float32)
    found = apply_rules(logits, parameters, history=[1, 2], first_id=0, vocab_size=3)
    assert np.isfinite(found).all()
    assert found[2] == MASKED


@pytest.mark.parametrize(
    ("values", "history", "message"),
    [
        ({"logit_bias": {40: 1.0}}, [], "the logit bias holds token ids from 40 to 40, outside"),
        ({"presence_penalty": 1.0}, [41], "the history holds token ids from 41 to 41, outside"),
    ],
)
def test_what_is_outside_the_vocabulary(
    values: dict[str, float], history: list[int], message: str
) -> None:
    parameters = SamplingParameters(**values)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        sample(LOGITS, history=history, parameters=parameters, position=0)
