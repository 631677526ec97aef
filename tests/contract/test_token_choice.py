"""Sessions that hold parts of a vocabulary choose the tokens that one with all of it chooses.

Real sessions and links; only the model is made up: its logits are a function of a request's tokens.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edge.backends.interface import HostLogits
from edge.backends.null import made_up
from edge.engine.distributed_sampling import DistributedSampling
from edge.kernels.sampling.parameters import SamplingParameters
from edge.kernels.sampling.ranking import likeliest
from edge.kernels.sampling.reference import sample
from edge.kernels.sampling.shortlist import SHORTLIST_TOKENS
from edge.protocol import step_frames
from edge.protocol.error_codec import Failed
from edge.protocol.step import SamplingTerms, Step, StepEntry
from tests.support.linked_shards import RUN, SPEC, VOCAB, logits_after, shards
from tests.support.slow_cases import repeats_are_slow
from tests.support.transport_pairs import LINK_KINDS

PARTS = {
    "one": [VOCAB],
    "two": [1100, 1900],
    "three": [1300, 0, 1700],
    "first_has_none": [0, 2000, 1000],
}
PARAMETERS = {
    "greedy": SamplingParameters(),
    "greedy_penalty": SamplingParameters(repetition_penalty=1.6),
    "temperature": SamplingParameters(temperature=1.2, seed=1),
    "penalty": SamplingParameters(temperature=0.8, repetition_penalty=1.6, seed=2),
    "top_k": SamplingParameters(temperature=1.0, top_k=9, seed=3),
    "top_p": SamplingParameters(temperature=1.1, top_p=0.7, seed=4),
    "min_p": SamplingParameters(temperature=1.3, min_p=0.2, seed=5),
    "all": SamplingParameters(
        temperature=1.2, top_k=30, top_p=0.9, min_p=0.02, repetition_penalty=1.3, seed=6
    ),
    "said": SamplingParameters(frequency_penalty=0.9, presence_penalty=0.7),
    "biased": SamplingParameters(
        temperature=1.0, top_p=0.9, frequency_penalty=-0.8, logit_bias={3: 9.0, 2999: 11.0}, seed=7
    ),
}


def expected_tokens(prompt: list[int], parameters: SamplingParameters) -> list[int]:
    history = list(prompt)
    for position in range(len(prompt), len(prompt) + 1 + RUN):
        history.append(
            sample(
                logits_after(*history),
                history=history,
                prompt_tokens=len(prompt),
                parameters=parameters,
                position=position,
            )
        )
    return history[len(prompt) :]


def test_no_mask_is_made_where_no_token_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask of a large vocabulary for each chunk of a prompt would be work in vain."""
    made: list[object] = []
    allowed = DistributedSampling._allowed

    def counted(*given: Any) -> Any:
        made.append(given)
        return allowed(*given)

    monkeypatch.setattr(DistributedSampling, "_allowed", counted)
    choice = DistributedSampling([range(VOCAB)], 0)
    terms = SamplingTerms(
        sampling=SamplingParameters(min_tokens=2),
        end_ids=frozenset({7}),
        max_new_tokens=9,
        prompt_tokens=4,
    )
    choice.begin("a", terms)
    chunk = StepEntry(request="a", position=0, tokens=(1, 2), logit_rows=0)
    logits = HostLogits(np.zeros((1, 1, VOCAB), np.float32), np.zeros((1, 1, 1), np.float32))
    assert choice.choose(Step(entries=(chunk,)), logits, pytest.fail) == []
    assert not made
    last = replace(chunk, position=2, logit_rows=1)
    assert len(choice.choose(Step(entries=(last,)), logits, pytest.fail)) == 1
    assert made


@pytest.mark.parametrize(
    ("parts", "kind", "shortlist_tokens"),
    repeats_are_slow(itertools.product(PARTS, LINK_KINDS, [SHORTLIST_TOKENS, 2])),
)
def test_every_split_chooses_the_same_tokens_one_request_at_a_time(
    parts: str, kind: str, shortlist_tokens: int
) -> None:
    """With shortlists of two tokens most choices are made from all logits after all."""
    with shards(PARTS[parts], kind=kind, shortlist_tokens=shortlist_tokens) as found:
        for name, parameters in PARAMETERS.items():
            prompt = [5, 7, 7, 30, len(name)]
            found.begin(name, parameters, prompt_tokens=len(prompt))
            answers = found.generate({name: prompt})
            assert answers == {name: expected_tokens(prompt, parameters)}, name


@pytest.mark.parametrize("shortlist_tokens", [SHORTLIST_TOKENS, 2])
@pytest.mark.parametrize("stage_before", [False, True])
@pytest.mark.parametrize("parts", ["two", "three"])
def test_requests_of_a_batch_may_each_choose_in_another_way(
    parts: str, stage_before: bool, shortlist_tokens: int
) -> None:
    with shards(
        PARTS[parts], stage_before=stage_before, shortlist_tokens=shortlist_tokens
    ) as found:
        for names in (list(PARAMETERS)[:4], list(PARAMETERS)[4:8], list(PARAMETERS)[8:]):
            prompts = {name: [1, 2, 3, len(name)] for name in names}
            for name in names:
                found.begin(name, PARAMETERS[name], prompt_tokens=4)
            assert found.generate(prompts) == {
                name: expected_tokens(prompts[name], PARAMETERS[name]) for name in names
            }


@pytest.mark.parametrize(
    ("parts", "shortlist_tokens", "names"),
    [("one", 2, ["greedy", "min_p"]), ("three", SHORTLIST_TOKENS, ["greedy", "top_p", "all"])],
)
def test_what_a_gpu_ranks_gives_the_same_tokens(
    parts: str, shortlist_tokens: int, names: list[str]
) -> None:
    """In one step some choices are made of what it ranks, and some of all logits after all."""
    with shards(PARTS[parts], shortlist_tokens=shortlist_tokens, ranks=True) as found:
        prompts = {name: [1, 2, 3, len(name)] for name in names}
        for name in names:
            found.begin(name, PARAMETERS[name])
        assert found.generate(prompts) == {
            name: expected_tokens(prompts[name], PARAMETERS[name]) for name in names
        }


@pytest.mark.parametrize(
    ("parts", "shortlist_tokens", "ranks"),
    repeats_are_slow(
        [
            *itertools.product(PARTS, [SHORTLIST_TOKENS, 2], [False]),
            ("one", 2, True),
            ("two", 2, True),
            ("three", SHORTLIST_TOKENS, True),
        ]
    ),
)
def test_how_likely_tokens_were_is_told_where_it_is_asked_for(
    parts: str, shortlist_tokens: int, ranks: bool
) -> None:
    """Of a batch in which not all ask, and not all choose in the same way; tokens stay the same."""
    asked = {"greedy": 3, "penalty": 0, "top_p": 20, "min_p": None}
    with shards(PARTS[parts], shortlist_tokens=shortlist_tokens, ranks=ranks) as found:
        prompts = {name: [1, 2, 3, len(name)] for name in asked}
        for name, count in asked.items():
            found.begin(name, PARAMETERS[name], logprobs=count)
        answers = found.generate(prompts)
        told = found.logprobs
    for place, (name, count) in enumerate(asked.items()):
        assert answers[name] == expected_tokens(prompts[name], PARAMETERS[name])
        for number, each in enumerate(told):
            logprobs = each[place]
            if count is None:
                assert logprobs is None
                continue
            assert logprobs is not None
            tokens = [*prompts[name], *answers[name][: number + 1]]
            logits = logits_after(*tokens).astype(np.float64)
            expected = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
            assert logprobs.logprob == pytest.approx(expected[answers[name][number + 1]], abs=1e-5)
            best = likeliest(logits_after(*tokens), 20)[:count]
            assert [token for token, _logprob in logprobs.top] == best.tolist()
            np.testing.assert_allclose([v for _t, v in logprobs.top], expected[best], atol=1e-5)


@pytest.mark.parametrize(
    ("parts", "shortlist_tokens", "ranks"),
    [
        ("one", SHORTLIST_TOKENS, True),
        ("two", 2, False),
        ("three", SHORTLIST_TOKENS, False),
        ("first_has_none", SHORTLIST_TOKENS, True),
    ],
)
def test_tokens_are_among_those_that_may_come(
    parts: str, shortlist_tokens: int, ranks: bool
) -> None:
    """Of a batch of which some may have any: what a mask leaves may all lie on one shard."""
    few = np.zeros((4, VOCAB), bool)
    few[0, [7, 2950]], few[1, 100:2000], few[2, 2999], few[3, ::3] = True, True, True, True
    masks = [*np.packbits(few, axis=1, bitorder="little")]
    names = [*PARAMETERS]
    with shards(PARTS[parts], shortlist_tokens=shortlist_tokens, ranks=ranks) as found:
        for turn, pair in enumerate(zip(names[::2], names[1::2], strict=True)):
            for number, mask in enumerate([*masks, None]):
                entries = []
                for name in pair:
                    request = f"{name} {number}"
                    found.begin(request, PARAMETERS[name], prompt_tokens=2)
                    start = StepEntry(request=request, position=0, tokens=(1, 2), logit_rows=0)
                    found.tokens(Step(entries=(start,)))
                    entries.append(replace(start, position=2, tokens=(turn,), logit_rows=1))
                allowed = {} if mask is None else {pair[turn % 2]: mask}
                named = {f"{name} {number}": [each] for name, each in allowed.items()}
                event = found.tokens(Step(entries=tuple(entries)), named)
                assert event.tokens == tuple(
                    sample(
                        logits_after(1, 2, turn),
                        history=[1, 2, turn],
                        prompt_tokens=2,
                        parameters=PARAMETERS[name],
                        position=3,
                        allowed=allowed.get(name),
                    )
                    for name in pair
                )
                for name in pair:
                    found.finish(f"{name} {number}")


class NothingButTheBest:
    """Logits that nobody may bring to the host."""

    can_rank = True

    def __init__(self, logits: NDArray[np.float32]) -> None:
        self._logits = logits

    def array(self) -> NDArray[np.float32]:
        raise AssertionError("all logits were asked for")

    def states(self) -> NDArray[np.float32]:
        raise AssertionError("hidden states were asked for")

    def best(self, count: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        columns = likeliest(self._logits, count).astype(np.int64)
        return columns[None], self._logits[None, columns]


@pytest.mark.parametrize("name", ["greedy", "top_k", "min_p"])
def test_all_logits_stay_where_the_best_of_them_tell_the_token(name: str) -> None:
    prompt = [4, 4, 9]
    choice = DistributedSampling([range(VOCAB)], 0)
    terms = SamplingTerms(sampling=PARAMETERS[name], end_ids=frozenset(), max_new_tokens=50)
    choice.begin("r", terms)
    entry = StepEntry(request="r", position=0, tokens=tuple(prompt), logit_rows=1)
    own = NothingButTheBest(logits_after(*prompt))
    (chosen,) = choice.choose(Step(entries=(entry,)), own, lambda: None)
    assert chosen.token == expected_tokens(prompt, PARAMETERS[name])[0]


@pytest.mark.parametrize("name", ["greedy", "temperature", "top_k", "top_p", "min_p", "all"])
def test_what_travels_is_little_beside_the_logits(name: str) -> None:
    prompt = [4, 4, 9]
    with shards(PARTS["two"]) as found:
        linking_bytes = found.sent_bytes
        found.begin(name, PARAMETERS[name])
        found.generate({name: prompt})
        tokens = 1 + RUN
        logits_bytes = 4 * PARTS["two"][1] * tokens
        # A candidate is 8 bytes, and so is what the sampler tells.
        most = 24 * tokens if name in ("greedy", "temperature") else logits_bytes / 2
        # Both shards send their part of each row, for each sum.
        rows, sums = len(prompt) + RUN, 1 + 2 * SPEC.num_layers
        sums_bytes = 2 * rows * sums * 4 * SPEC.hidden_size
        assert 0 < found.sent_bytes - linking_bytes - sums_bytes <= most


def test_logits_travel_when_shortlists_do_not_tell_and_only_then() -> None:
    """A flat distribution: 70 % of it is far more tokens than a shortlist has."""
    flat = SamplingParameters(temperature=50.0, top_p=0.7)
    prompt = [4, 4, 9]
    with shards(PARTS["two"]) as found:
        found.begin("flat", flat)
        assert found.generate({"flat": prompt}) == {"flat": expected_tokens(prompt, flat)}
        assert found.sent_bytes > 4 * PARTS["two"][1] * (1 + RUN)


@pytest.mark.parametrize("parts", PARTS)
def test_logits_that_are_asked_for_are_all_there(parts: str) -> None:
    tokens = [8, 3, 2, 4]
    with shards(PARTS[parts]) as found:
        entry = StepEntry(request="r", position=0, tokens=tuple(tokens), logit_rows=4)
        event = found.step(Step(entries=(entry,)))
        assert isinstance(event, step_frames.Logits)
        rows = np.frombuffer(event.rows, np.float32).reshape(4, VOCAB)
        for row in range(4):
            np.testing.assert_array_equal(rows[row], logits_after(*tokens[: row + 1]))


@pytest.mark.parametrize("stage_before", [False, True])
@pytest.mark.parametrize("parts", PARTS)
def test_hidden_states_that_are_asked_for_are_all_there(parts: str, stage_before: bool) -> None:
    """Also where the sampler has no part of the vocabulary; and the next step is as ever."""
    tokens = [8, 3, 2, 4]
    entry = StepEntry(request="r", position=0, tokens=tuple(tokens), logit_rows=3)
    with shards(PARTS[parts], stage_before=stage_before) as found:
        event = found.step(Step(entries=(entry,), states=True))
        assert isinstance(event, step_frames.States)
        rows = np.frombuffer(event.rows, np.float32).reshape(3, -1)
        for row in range(3):
            np.testing.assert_array_equal(
                made_up.logits(rows[row : row + 1], range(VOCAB))[0],
                logits_after(*tokens[: row + 2]),
            )
        found.begin("greedy", SamplingParameters(), prompt_tokens=3)
        expected = expected_tokens([5, 7, 7], SamplingParameters())
        assert found.generate({"greedy": [5, 7, 7]}) == {"greedy": expected}


@pytest.mark.parametrize("ranks", [False, True])
@pytest.mark.parametrize("name", ["greedy", "temperature", "top_p"])
@pytest.mark.parametrize("broken_id", [0, VOCAB - 1])
def test_logits_that_are_not_finite_are_reported_wherever_they_are(
    name: str, broken_id: int, ranks: bool
) -> None:
    with shards(PARTS["two"], broken_id=broken_id, ranks=ranks) as found:
        found.begin(name, PARAMETERS[name])
        entry = StepEntry(request=name, position=0, tokens=(1, 2), logit_rows=1)
        event = found.step(Step(entries=(entry,)))
        assert isinstance(event, Failed)
        assert f"1 of {VOCAB} logits are NaN or infinite" in event.message
