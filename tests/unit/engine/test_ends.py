"""Whether a reply is at its end is decided where its tokens are chosen."""

from __future__ import annotations

import pytest

from edge.engine.distributed_sampling import DistributedSampling
from edge.kernels.sampling.parameters import SamplingParameters
from edge.protocol.step import FinishReason, SamplingTerms, Step, StepEntry

STEP = Step(entries=(StepEntry(request="a", position=3, tokens=(1,), logit_rows=1),))


def choice(end_ids: set[int], max_new_tokens: int) -> DistributedSampling:
    made = DistributedSampling([range(20)], 0)
    terms = SamplingTerms(
        sampling=SamplingParameters(), end_ids=frozenset(end_ids), max_new_tokens=max_new_tokens
    )
    made.begin("a", terms)
    return made


@pytest.mark.parametrize(
    ("end_ids", "max_new_tokens", "expected"),
    [
        (set(), 3, [None, None, "length"]),
        ({11, 12}, 9, [None, "stop", "stop"]),
        ({12}, 3, [None, None, "stop"]),
    ],
    ids=["length", "an end token", "an end token that is also the last"],
)
def test_why_a_reply_ends(
    end_ids: set[int], max_new_tokens: int, expected: list[FinishReason | None]
) -> None:
    made = choice(end_ids, max_new_tokens)
    assert [made.take(STEP, [token])[0] for token in (10, 11, 12)] == expected


def test_a_cancelled_request_ends_its_run_and_nothing_else() -> None:
    made = choice(set(), 9)
    assert not made.ends_run(STEP)
    made.cancel("a")
    made.cancel("unknown")
    assert made.ends_run(STEP)
    assert made.take(STEP, [10]) == [None]


def test_every_request_of_a_step_ends_for_itself() -> None:
    made = choice({11}, 2)
    terms = SamplingTerms(sampling=SamplingParameters(), end_ids=frozenset(), max_new_tokens=2)
    made.begin("b", terms)
    entry = StepEntry(request="b", position=5, tokens=(2,), logit_rows=1)
    both = Step(entries=(*STEP.entries, entry))
    assert made.take(both, [11, 11]) == ["stop", None]
    assert made.take(both, [3, 3]) == ["length", "length"]
