"""What a kept cache is worth: what it would cost to compute again."""

from __future__ import annotations

from itertools import takewhile

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from edge.memory.recomputing import ATTENTION_TOKENS, effort
from edge.scheduling.prefixes import (
    Found,
    PrefixCacheIndex,
    cut,
    joined,
)


def test_what_another_cache_has_as_well_costs_nothing() -> None:
    prefixes = PrefixCacheIndex(chunk_tokens=2)
    common = list(range(100))
    for name, tail in (("a", [500, 501]), ("b", [600] * 40), ("c", [])):
        tokens = common + tail if tail else [700] * 100
        prefixes.keep(name, tokens)
    alone = prefixes.cost("a", ["a"])
    assert 102 < alone < 104
    assert 2 <= prefixes.cost("a", ["a", "b", "c"]) < 2.1
    assert 40 < prefixes.cost("b", ["a", "b", "c"]) < 42
    assert prefixes.cost("c", ["a", "b", "c"]) > 100


def test_who_has_another_salt_has_nothing_in_common() -> None:
    prefixes = PrefixCacheIndex(chunk_tokens=2)
    tokens = list(range(100))
    prefixes.keep("a", tokens, salt="one")
    prefixes.keep("b", tokens)
    assert prefixes.find(tokens, "other") is None
    for salt, name in (("one", "a"), ("", "b")):
        found = prefixes.find(tokens, salt)
        assert found is not None
        assert found.request == name
    assert len(prefixes.common(np.asarray(tokens), "one")) == 1
    assert prefixes.cost("a", ["a", "b"]) == prefixes.cost("a", ["a"]) == effort(100)
    prefixes.keep("c", tokens, salt="one")
    assert prefixes.cost("a", ["a", "b", "c"]) == 0


def alike(one: list[int], other: list[int]) -> int:
    return sum(1 for _ in takewhile(lambda two: two[0] == two[1], zip(one, other, strict=False)))


few_tokens = st.lists(st.integers(0, 2), max_size=6)


@given(
    st.lists(st.tuples(st.sampled_from("abcdefgh"), few_tokens), max_size=20),
    st.lists(st.booleans(), max_size=20),
    st.sets(st.sampled_from("abcdefgh")),
)
def test_costs_are_those_of_comparing_every_two(
    kept: list[tuple[str, list[int]]], drops: list[bool], among: set[str]
) -> None:
    """However they came, went and came again; also among a few of them."""
    prefixes, there = PrefixCacheIndex(chunk_tokens=2), dict[str, list[int]]()
    for at, (name, tokens) in enumerate(kept):
        prefixes.keep(name, tokens)
        there[name] = tokens
        if at < len(drops) and drops[at]:
            gone = min(there)
            prefixes.drop(gone)
            del there[gone]
    for name, tokens in there.items():
        others = [there[each] for each in among & there.keys() - {name}]
        shared = max((alike(tokens, each) for each in others), default=0)
        assert prefixes.cost(name, among) == effort(len(tokens)) - effort(shared)


def test_attention_makes_later_tokens_dearer() -> None:
    prefixes = PrefixCacheIndex(chunk_tokens=2)
    long = list(range(2 * ATTENTION_TOKENS))
    prefixes.keep("long", long)
    assert prefixes.cost("long", ["long"]) == 2 * len(long)


def test_a_prompt_may_be_cut_at_its_units_and_an_answer_anywhere() -> None:
    prefixes = PrefixCacheIndex(chunk_tokens=4, fewest_tokens=1)
    said = list(range(30))
    prefixes.keep("r", said, ((10, 17), (25, 30)))

    def found(common: int) -> Found | None:
        return prefixes.find([*said[:common], *[99] * 20])

    for common, tokens in ((9, 8), (10, 8), (11, 11), (16, 16), (17, 17), (20, 17), (22, 21)):
        assert (it := found(common)) is not None
        assert it.tokens == tokens
        assert it.singly == (((10, min(tokens, 17)),) if tokens > 10 else ())
        assert not it.is_whole
    whole = found(30)
    assert whole == Found(request="r", tokens=30, singly=((10, 17), (25, 30)), is_whole=True)
    again = prefixes.find(said)
    assert again is not None
    assert again.tokens == 28, "two are always left to compute"


def test_no_answer_is_of_use_where_no_bit_may_depend_on_it() -> None:
    prefixes = PrefixCacheIndex(chunk_tokens=2, fewest_tokens=4, is_strict=True)
    assert prefixes.worth_keeping(30, ((11, 30),)) == 11
    assert prefixes.worth_keeping(30, ()) == 30
    assert prefixes.worth_keeping(30, ((3, 30),)) == 0
    said = list(range(30))
    prefixes.keep("r", said, ((11, 17),))
    found = prefixes.find([*said, 99, 99])
    assert found == Found(request="r", tokens=10, singly=(), is_whole=True)


def test_spans_are_joined_and_cut() -> None:
    assert joined((), (3, 5)) == ((3, 5),)
    assert joined(((1, 2), (7, 9)), (2, 4)) == ((1, 4), (7, 9))
    assert joined(((1, 2), (4, 9)), (2, 4)) == ((1, 9),)
    assert cut(((1, 2), (4, 9)), 6) == ((1, 2), (4, 6))
    assert cut(((1, 2), (4, 9)), 4) == ((1, 2),)
