"""Perplexity, divergence and agreement against torch, and against sums written out."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from edge.studies import logit_statistics
from edge.studies.logit_statistics import compare, figures, joined, log_probabilities

VOCAB = 97


def some_logits(seed: int, rows: int = 40, spread: float = 4.0) -> NDArray[np.float32]:
    generator = np.random.default_rng(seed)
    return (spread * generator.standard_normal((rows, VOCAB))).astype(np.float32)


def some_tokens(rows: int = 40) -> list[int]:
    return [(7 * row) % VOCAB for row in range(rows)]


def test_losses_and_divergences_are_those_of_torch() -> None:
    reference, logits, tokens = some_logits(1), some_logits(2), some_tokens()
    found = compare(reference, logits, tokens)
    ours, theirs = (torch.from_numpy(each).double() for each in (logits, reference))
    losses = torch.nn.functional.cross_entropy(ours, torch.tensor(tokens), reduction="none")
    divergences = torch.nn.functional.kl_div(
        ours.log_softmax(1), theirs.log_softmax(1), log_target=True, reduction="none"
    ).sum(1)
    np.testing.assert_allclose(found.losses, losses.numpy(), rtol=1e-12)
    np.testing.assert_allclose(found.divergences, divergences.numpy(), rtol=1e-12)
    assert found.same_top.tolist() == (ours.argmax(1) == theirs.argmax(1)).tolist()


def test_one_position_written_out() -> None:
    # Probabilities 1/2, 1/4, 1/4 against 1/4, 1/2, 1/4.
    reference = np.log(np.array([[2.0, 1.0, 1.0]]))
    logits = np.log(np.array([[1.0, 2.0, 1.0]]))
    found = figures(compare(reference, logits, [1]))
    assert found.perplexity == pytest.approx(2.0)
    assert found.mean_kl == pytest.approx(0.25 * math.log(2.0))
    assert found.p99_kl == pytest.approx(found.mean_kl)
    assert found.same_top == 0.0


def test_a_constant_on_a_row_changes_nothing() -> None:
    reference, logits, tokens = some_logits(1), some_logits(2), some_tokens()
    plain = compare(reference, logits, tokens)
    moved = compare(log_probabilities(reference), logits.astype(np.float64) + 1000.0, tokens)
    np.testing.assert_allclose(moved.losses, plain.losses, rtol=1e-9)
    np.testing.assert_allclose(moved.divergences, plain.divergences, rtol=1e-9)


def test_large_logits_do_not_overflow() -> None:
    logits = np.array([[3e4, 0.0, -3e4]], np.float32)
    found = compare(logits, logits, [0])
    assert found.losses.tolist() == [0.0]
    assert found.divergences.tolist() == [0.0]
    assert figures(compare(None, logits, [2])).perplexity == math.inf


def test_the_reference_itself_diverges_by_nothing() -> None:
    logits, tokens = some_logits(3), some_tokens()
    itself, compared = compare(None, logits, tokens), compare(logits, logits, tokens)
    np.testing.assert_array_equal(itself.losses, compared.losses)
    assert not itself.divergences.any()
    assert not compared.divergences.any()
    assert itself.same_top.all()
    assert compared.same_top.all()


def test_pieces_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    reference, logits, tokens = some_logits(1), some_logits(2), some_tokens()
    whole = compare(reference, logits, tokens)
    monkeypatch.setattr(logit_statistics, "_NUMBERS_AT_ONCE", 3 * VOCAB)
    pieces = compare(reference, logits, tokens)
    parts = [
        compare(reference[begin:end], logits[begin:end], tokens[begin:end])
        for begin, end in ((0, 13), (13, 40))
    ]
    for found in (pieces, joined(parts)):
        np.testing.assert_array_equal(found.losses, whole.losses)
        np.testing.assert_array_equal(found.divergences, whole.divergences)
        np.testing.assert_array_equal(found.same_top, whole.same_top)


def test_the_99th_percentile_is_beyond_most() -> None:
    reference, logits = some_logits(1, rows=200), some_logits(2, rows=200)
    positions = compare(reference, logits, some_tokens(200))
    beyond = (positions.divergences > figures(positions).p99_kl).sum()
    assert beyond == 2
