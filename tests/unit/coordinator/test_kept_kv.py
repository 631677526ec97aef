"""Copies of keys and values: what is kept of them, and how far an answer can be given back."""

from __future__ import annotations

from edge.coordinator.kept_kv import Copy, KeptKv, KvForm, shape_of
from tests.support.plans import bundled_plan


def copy(first: int, tokens: int = 8) -> Copy:
    return Copy(first=first, tokens=tokens, rows=bytes(tokens))


def kept() -> KeptKv:
    form = KvForm(shape=(), digests={(0, 0): "d", (1, 0): "d"})
    return KeptKv(form=form, prompt_tokens=5)


def test_what_follows_is_kept_and_nothing_else() -> None:
    answer = kept()
    assert not answer.add((0, 0), copy(6))
    assert answer.add((0, 0), copy(5))
    assert not answer.add((0, 0), copy(5))
    assert not answer.add((0, 0), copy(14))
    assert answer.add((0, 0), copy(13))
    assert answer.num_bytes == 16


def test_as_much_is_given_back_as_every_shard_has_sent() -> None:
    answer = kept()
    for first in (5, 13, 21):
        answer.add((0, 0), copy(first))
    assert answer.whole(100) == 0
    answer.add((1, 0), copy(5))
    answer.add((1, 0), copy(13))
    assert answer.whole(100) == 16
    assert answer.whole(15) == 8
    assert answer.whole(7) == 0
    answer.cut(8)
    assert answer.num_bytes == 16
    assert answer.add((1, 0), copy(13)), "it comes again"


def test_where_the_ends_of_copies_differ() -> None:
    answer = kept()
    answer.add((0, 0), copy(5, 6))
    answer.add((0, 0), copy(11, 8))
    answer.add((1, 0), copy(5, 8))
    answer.add((1, 0), copy(13, 6))
    assert answer.whole(100) == 14


def test_plans_that_cut_alike_have_one_shape() -> None:
    plan = bundled_plan("tensor_2", devices=["a", "b"])
    other = bundled_plan("tensor_2", devices=["c", "a"])
    assert shape_of(plan) == shape_of(other)
    assert shape_of(plan) != shape_of(bundled_plan("pipeline_2", devices=["a", "b"]))
