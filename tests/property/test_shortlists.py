"""However the vocabulary is cut, the shortlists of its parts choose the token of the whole."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from edge.kernels.sampling.nucleus import add_octaves, weigh
from edge.kernels.sampling.parameters import SamplingParameters
from edge.kernels.sampling.ranking import likeliest
from edge.kernels.sampling.reference import sample
from edge.kernels.sampling.shortlist import choose, make_shortlist, shortlist_dtype

sizes = st.integers(1, 40) | st.integers(41, 700)
all_logits = sizes.flatmap(
    lambda size: hnp.arrays(
        np.float32,
        size,
        elements=st.floats(-50, 50, width=32)
        | st.sampled_from([0.0, -0.0, 1.0, 1.5, -3e38, 3e38, 1e-45]),
    )
)
all_parameters = st.builds(
    SamplingParameters,
    temperature=st.sampled_from([0.0, 1e-300, 0.7, 1.0, 1e300]) | st.floats(0, 5),
    top_k=st.sampled_from([0, 0, 1, 3]) | st.integers(0, 800),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.0]) | st.floats(0, 1),
    min_p=st.sampled_from([0.0, 0.0, 1.0, 0.05]) | st.floats(0, 1),
    repetition_penalty=st.sampled_from([1.0, 1.3]) | st.floats(0.01, 100),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.7]) | st.floats(-2, 2),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.1]) | st.floats(-2, 2),
    seed=st.integers(0, 2**64 - 1),
)
EVERY_FILTER = [
    SamplingParameters(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    for temperature, top_k, top_p, min_p in itertools.product(
        (0.6, 1.0, 1.8), (0, 1, 40, 300), (0.0, 0.8, 1.0), (0.0, 0.1)
    )
]


def bits_of(ids: set[int] | None, vocab_size: int) -> np.ndarray | None:
    if ids is None:
        return None
    bits = np.zeros(vocab_size, np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little")


def choose_in_parts(
    logits: np.ndarray,
    cuts: list[int],
    parameters: SamplingParameters,
    *,
    history: list[int],
    position: int,
    tokens: int,
    prompt_tokens: int = 0,
    allowed: np.ndarray | None = None,
) -> int | None:
    """As shards do it that hold the logits between the cuts; some may hold none."""
    bounds = [0, *sorted(cuts), logits.size]
    parts = list(itertools.pairwise(bounds))
    columns = [stop - start for start, stop in parts]
    messages = []
    for start, stop in parts:
        shortlist = make_shortlist(
            logits[start:stop],
            first_id=start,
            vocab_size=logits.size,
            history=history,
            parameters=parameters,
            position=position,
            tokens=tokens,
            prompt_tokens=prompt_tokens,
            allowed=allowed,
        )
        dtype = shortlist_dtype(
            parameters, columns=stop - start, vocab_size=logits.size, tokens=tokens
        )
        messages.append(np.frombuffer(shortlist.tobytes(), dtype))
    return choose(messages, columns=columns, parameters=parameters, position=position)


@given(all_logits, all_parameters, st.sampled_from([1, 2, 7, 1000]), st.data())
@settings(max_examples=80)
def test_shortlists_choose_the_token_of_all_logits_or_do_not_tell(
    logits: np.ndarray, parameters: SamplingParameters, tokens: int, data: st.DataObject
) -> None:
    history = data.draw(st.lists(st.integers(0, logits.size - 1), max_size=6))
    cuts = data.draw(st.lists(st.integers(0, logits.size), max_size=4))
    position = data.draw(st.integers(0, 2**40))
    prompt_tokens = data.draw(st.integers(0, len(history)))
    ids = st.integers(0, logits.size - 1)
    biases = data.draw(st.dictionaries(ids, st.sampled_from([-100.0, 5.0, 3.4e38]), max_size=4))
    parameters = replace(parameters, logit_bias=biases)
    allowed = bits_of(data.draw(st.none() | st.sets(ids, min_size=1, max_size=9)), logits.size)
    chosen = choose_in_parts(
        logits,
        cuts,
        parameters,
        history=history,
        position=position,
        tokens=tokens,
        prompt_tokens=prompt_tokens,
        allowed=allowed,
    )
    whole = sample(
        logits,
        history=history,
        parameters=parameters,
        position=position,
        prompt_tokens=prompt_tokens,
        allowed=allowed,
    )
    assert chosen in (None, whole)
    if allowed is not None and (logits > -1e38).all() and not biases:
        assert np.unpackbits(allowed, bitorder="little")[whole], "nothing else is ever chosen"
    unfiltered = parameters.min_p == 0.0 and parameters.top_p == 1.0 and parameters.top_k == 0
    if parameters.temperature == 0.0 or unfiltered or tokens >= logits.size:
        assert chosen == whole


@pytest.mark.parametrize("parameters", EVERY_FILTER, ids=lambda each: repr(each.to_json()))
def test_peaked_distributions_need_no_more_than_shortlists(parameters: SamplingParameters) -> None:
    """As a model's are: a few tokens far above very many others."""
    random = np.random.default_rng(8)
    for position in range(6):
        logits = (random.gumbel(size=20_011) * 2.5).astype(np.float32)
        history = random.integers(0, logits.size, 50).tolist()
        whole = sample(logits, history=history, parameters=parameters, position=position)
        for cuts in ([9_000], [4_000, 4_000, 15_000]):
            chosen = choose_in_parts(
                logits, cuts, parameters, history=history, position=position, tokens=256
            )
            asks = parameters.temperature > 1.5 and parameters.top_p * parameters.top_k == 0
            assert chosen == whole or (asks and chosen is None)


def test_equal_scores_that_go_on_behind_a_shortlist_are_not_guessed() -> None:
    """Of 30 equal tokens, top-k keeps them all; a shortlist of 5 shows that there are more."""
    logits = np.zeros(30, np.float32)
    for top_p in (1.0, 0.9):
        parameters = SamplingParameters(temperature=1.0, top_k=3, top_p=top_p)
        assert choose_in_parts(logits, [15], parameters, history=[], position=0, tokens=5) is None


@given(all_logits, st.floats(1e-3, 100), st.data())
@settings(max_examples=60)
def test_weight_is_the_same_however_it_is_summed(
    logits: np.ndarray, temperature: float, data: st.DataObject
) -> None:
    cuts = data.draw(st.lists(st.integers(0, logits.size), max_size=4))
    whole = weigh(logits, temperature)
    parts = add_octaves(
        [
            weigh(logits[start:stop], temperature)
            for start, stop in itertools.pairwise([0, *sorted(cuts), logits.size])
        ]
    )
    assert parts.top == whole.top
    assert parts.sums.tolist() == whole.sums.tolist()
    best = float(logits.max())
    relative = float(np.exp((logits.astype(np.float64) - best) / temperature).sum())
    assert math.log2(whole.total) + whole.top - 93 == pytest.approx(
        best / temperature * math.log2(math.e) + math.log2(relative), rel=1e-12, abs=1e-6
    )


@given(all_logits, st.integers(1, 800))
@settings(max_examples=60)
def test_the_likeliest_are_the_first_of_the_whole_ranking(logits: np.ndarray, count: int) -> None:
    ranking = np.lexsort((np.arange(logits.size), -logits))
    np.testing.assert_array_equal(likeliest(logits, count), ranking[:count])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_refused_as_in_the_whole(
    bad: float, temperature: float
) -> None:
    logits = np.array([0.0, bad, 1.0, bad, 2.0], np.float32)
    parameters = SamplingParameters(temperature=temperature, top_p=0.5)
    with pytest.raises(ValueError, match=r"2 of 5 logits are NaN or infinite.*checkpoint"):
        choose_in_parts(logits, [2, 2], parameters, history=[], position=0, tokens=3)


def test_a_history_outside_the_vocabulary_is_refused_by_every_part() -> None:
    parameters = SamplingParameters(repetition_penalty=1.1)
    for first_id in (0, 4):
        with pytest.raises(ValueError, match="outside the vocabulary of 8"):
            make_shortlist(
                np.zeros(4, np.float32),
                first_id=first_id,
                vocab_size=8,
                history=[3, 8],
                parameters=parameters,
                position=0,
            )
