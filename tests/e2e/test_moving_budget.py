"""A budget that moves while replies go on: the bench in its short form, and what it lets pass."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from edge.demos.bench.moving_budget import after_budgets, budgets, keeps_its_promise, run
from edge.demos.bench.results import Figures
from edge.demos.bench.shapes import checkpoint
from tests.support.slow_cases import shown_in_parts


@shown_in_parts("multiprocess/test_memory_promise.py")
def test_a_peer_keeps_every_promise_and_its_tokens(tmp_path: Path) -> None:
    figures = run(
        checkpoint("small", tmp_path),
        cache=tmp_path / "cache",
        dtype="float32",
        block_size=128,
        threads=1,
        at_once=2,
        seed=1,
        ends=after_budgets(2),
    )
    assert keeps_its_promise(figures), figures.values
    (num_replies,) = figures.values["replies", "count"]
    assert num_replies >= 2
    assert len(figures.values["peak resident / budget", "ratio"]) == 2
    assert max(figures.values["streamed for a token", "MB"]) > 0


@pytest.mark.parametrize(
    ("held", "meanwhile", "others", "is_kept"),
    [(1.0, 1.0, 0, True), (1.01, 1.0, 0, False), (0.9, 1.01, 0, False), (0.9, 0.9, 1, False)],
)
def test_a_promise_that_was_broken_is_told(
    held: float, meanwhile: float, others: int, is_kept: bool
) -> None:
    figures = Figures()
    figures.add("highest peak resident / budget", "ratio", held)
    figures.add("highest peak meanwhile / larger budget", "ratio", meanwhile)
    figures.add("replies with other tokens", "count", others)
    assert keeps_its_promise(figures) is is_kept


def test_budgets_move_up_and_down_the_same_way_again() -> None:
    one, other = (
        list(
            itertools.islice(
                budgets(np.random.default_rng(7), taken_bytes=1000, weight_bytes=800), 50
            )
        )
        for _ in range(2)
    )
    assert one == other
    assert 400 <= min(one) < 500
    assert 900 < max(one) <= 1000
