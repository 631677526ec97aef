"""What a kept cache is worth: what it would cost to compute again."""

from __future__ import annotations

from edge.coordinator.beginnings import ATTENTION_TOKENS, Beginnings


def test_what_another_cache_has_as_well_costs_nothing() -> None:
    beginnings = Beginnings(chunk_tokens=2)
    common = list(range(100))
    for name, tail in (("a", [500, 501]), ("b", [600] * 40), ("c", [])):
        tokens = common + tail if tail else [700] * 100
        beginnings.keep(name, tokens, computed_as_prompt=len(tokens), goes_on=False)
    alone = beginnings.cost("a", ["a"])
    assert 102 < alone < 104
    assert 2 <= beginnings.cost("a", ["a", "b", "c"]) < 2.1
    assert 40 < beginnings.cost("b", ["a", "b", "c"]) < 42
    assert beginnings.cost("c", ["a", "b", "c"]) > 100


def test_attention_makes_later_tokens_dearer() -> None:
    beginnings = Beginnings(chunk_tokens=2)
    long = list(range(2 * ATTENTION_TOKENS))
    beginnings.keep("long", long, computed_as_prompt=len(long), goes_on=False)
    assert beginnings.cost("long", ["long"]) == 2 * len(long)


def test_an_answer_counts_where_somebody_will_go_on_from_it() -> None:
    beginnings = Beginnings(chunk_tokens=2)
    for name, goes_on in (("one", False), ("chat", True)):
        tokens = [len(name)] * 60
        beginnings.keep(name, tokens, computed_as_prompt=20, goes_on=goes_on)
    assert 20 < beginnings.cost("one", ["one", "chat"]) < 21
    assert 60 < beginnings.cost("chat", ["one", "chat"]) < 61
