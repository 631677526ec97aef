"""Tokens are drawn as often as `transformers` would draw them by a model's generation_config."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import edge
from edge.kernels.sampling.parameters import SamplingParameters
from tests.support.checkpoints import TinyCheckpoint
from tests.support.plans import make_plan
from tests.support.slow_cases import shown_in_parts
from tests.unit.kernels.test_sampling import reference_probabilities

FEWEST_EXPECTED = 5
"""Of a bin, so that its count is nearly normal."""

DEFAULTS = {"temperature": 1.0, "top_k": 50}
"""Of `transformers`, where a file says no more than that tokens are drawn."""

NEUTRAL = SamplingParameters(temperature=1.0)


@pytest.mark.parametrize(
    ("settings", "draws"),
    [
        pytest.param(
            {"temperature": 0.6, "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.3},
            800,
            marks=shown_in_parts("unit/kernels/test_sampling.py"),
        ),
        pytest.param(
            {"temperature": 0.8, "min_p": 0.05, "top_k": 0},
            400,
            marks=shown_in_parts("unit/kernels/test_sampling.py"),
        ),
        ({}, 200),
    ],
    ids=["top_p", "min_p", "defaults"],
)
def test_draws_are_those_of_transformers_by_chi_squared(
    five_peers: edge.Cluster,
    tiny_checkpoint: Callable[..., TinyCheckpoint],
    tmp_path: Path,
    settings: dict[str, float],
    draws: int,
) -> None:
    """A seed for each draw, so it is always the same statistic. By one of the settings less, the
    same draws are seen to be others: of draws there are as many as that takes.

    By one peer: a seed draws the same on every plan (`test_seeded_sampling.py`).
    """
    checkpoint = tiny_checkpoint("many_words")
    folder = Path(shutil.copytree(checkpoint.path, tmp_path / "sampled"))
    config = {"do_sample": True, **settings}
    (folder / "generation_config.json").write_text(json.dumps(config))
    prompt = checkpoint.prompt(21)  # has some of the likeliest tokens, to be penalised
    plan = make_plan(checkpoint.spec, "solo", model=folder.name)
    with five_peers.load(folder, dtype="float32", plan=plan, concurrency=8) as model:
        streams = [
            model.stream(prompt, max_new_tokens=1, ignore_eos=True, seed=seed)
            for seed in range(draws)
        ]
        drawn = [token.token_id for stream in streams for token in stream]
    logits = checkpoint.logits(prompt)[-1]
    counts = np.bincount(drawn, minlength=logits.size)

    def may_be_of(parameters: SamplingParameters) -> bool:
        return _may_be_of(counts, draws * reference_probabilities(logits, prompt, parameters))

    parameters = SamplingParameters(**(DEFAULTS | settings))  # type: ignore[arg-type]
    assert may_be_of(parameters)
    for name in DEFAULTS | settings:
        neutral = getattr(NEUTRAL, name)
        if getattr(parameters, name) != neutral:
            assert not may_be_of(replace(parameters, **{name: neutral})), name


def _may_be_of(counts: NDArray[np.int64], expected: NDArray[np.float64]) -> bool:
    """Whether so many of each are within four deviations of what is expected."""
    if counts[expected == 0].any():
        return False  # a filter leaves these out
    is_large = expected >= FEWEST_EXPECTED
    observed = [*counts[is_large], counts[~is_large].sum()]
    wanted = [*expected[is_large], expected[~is_large].sum()]
    bins = [(o, w) for o, w in zip(observed, wanted, strict=True) if w > 0]
    statistic = sum((o - w) ** 2 / w for o, w in bins)
    freedom = len(bins) - 1
    return bool(statistic < freedom + 4 * np.sqrt(2 * freedom))
