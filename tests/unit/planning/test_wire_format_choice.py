"""Which sums and hops are rounded on the wire: as asked, or where the links say that it pays."""

from __future__ import annotations

from itertools import permutations

import pytest

from edge.errors import RequestError
from edge.partition import LinkSpec, Plan, Shard, Stage
from edge.planning.load_options import LoadOptions
from edge.planning.wire_format_choice import choose_wire_rules
from edge.protocol.wire_rules import WIRES, WireRules, number_bytes
from edge.transport import WireRule
from tests.support.formats import uniform_format

INT4 = uniform_format("int4", 32)
MBIT = 1e6 / 8
EXACT = WireRule()

TOKEN_BYTES = 4 * 2048
"""The hidden state of a token in a model of 1 B parameters."""

CHUNK_BYTES = 256 * TOKEN_BYTES


def plan(*stages: str) -> Plan:
    """One device for each letter, one stage for each word."""
    one = range(1)
    return Plan(
        model="m",
        version=0,
        stages=tuple(
            Stage(
                layers=range(number, number + 1),
                shards=tuple(
                    Shard(device=device, heads=one, ffn_columns=one, vocab=one) for device in names
                ),
            )
            for number, names in enumerate(stages)
        ),
    )


def link(source: str, target: str, mbit: float) -> LinkSpec:
    return LinkSpec(source=source, target=target, latency_s=1e-4, bytes_per_s=mbit * MBIT)


def mesh(devices: str, mbit: float) -> list[LinkSpec]:
    return [link(one, other, mbit) for one, other in permutations(devices, 2)]


def chosen(*stages: str, links: list[LinkSpec], format: object = INT4) -> WireRules:
    return choose_wire_rules("auto", plan(*stages), links=links, weight_format=format)  # type: ignore[arg-type]


@pytest.mark.parametrize("wire", ["float32", "float16", "int8"])
def test_a_format_that_was_asked_for_is_taken_everywhere(wire: str) -> None:
    for links in ([], mesh("abc", 10), mesh("abc", 1e5)):
        rules = choose_wire_rules(wire, plan("ab", "c"), links=links, weight_format=INT4)  # type: ignore[arg-type]
        rule = WireRule(format=wire)  # type: ignore[arg-type]
        assert rules == WireRules(sums=(rule, rule), hops=(rule,))


def test_auto_leaves_links_alone_that_nobody_measured() -> None:
    rules = chosen("ab", "cde", links=mesh("xyz", 1))
    assert rules == WireRules(sums=(EXACT, EXACT), hops=(EXACT,))


@pytest.mark.parametrize(
    ("mbit", "tokens", "chunks"),
    [(100, True, True), (300, True, True), (1000, False, True), (10_000, False, False)],
)
def test_auto_rounds_what_the_link_is_slow_for(mbit: float, tokens: bool, chunks: bool) -> None:
    """Single tokens over slow links, prompts over a gigabit too, nothing over the fastest."""
    (rule,) = chosen("ab", links=mesh("ab", mbit)).sums
    assert (rule.format != "float32" and rule.above_bytes < TOKEN_BYTES) == tokens
    assert (rule.format != "float32" and rule.above_bytes < CHUNK_BYTES) == chunks


@pytest.mark.parametrize(
    ("dtype", "accuracy", "expected"),
    [
        ("int4", "fast", "int8"),
        ("int8", "fast", "int8"),
        ("int4", "high", "float16"),
        ("float32", "fast", "float16"),
    ],
)
def test_auto_is_never_coarser_than_the_products(dtype: str, accuracy: str, expected: str) -> None:
    rules = chosen("ab", "c", links=mesh("abc", 100), format=uniform_format(dtype, 32, accuracy))
    assert {rules.sums[0].format, rules.hops[0].format} == {expected}


def test_a_slower_link_rounds_smaller_messages() -> None:
    limits = [chosen("ab", links=mesh("ab", mbit)).sums[0].above_bytes for mbit in (1000, 300, 50)]
    assert limits == sorted(limits, reverse=True)
    assert len(set(limits)) == 3


def test_the_slowest_device_of_a_stage_decides() -> None:
    fast = [each for each in mesh("abc", 1e5) if {each.source, each.target} != {"a", "b"}]
    assert chosen("abc", links=fast).sums == (EXACT,)
    assert chosen("abc", links=[*fast, link("a", "b", 100)]).sums[0].format == "int8"
    assert chosen("abc", links=[*fast, link("b", "a", 100)]).sums[0].format == "int8"


def test_each_stage_and_hop_is_judged_by_its_own_links() -> None:
    links = [*mesh("ab", 1e5), *mesh("cd", 100), link("a", "c", 100), link("b", "d", 10_000)]
    rules = chosen("ab", "cd", "e", links=links)
    assert [rule.format for rule in rules.sums] == ["float32", "int8", "float32"]
    assert [rule.format for rule in rules.hops] == ["int8", "float32"]


def test_a_hop_goes_from_rank_j_mod_n() -> None:
    links = [link("a", "b", 1e5), link("a", "c", 1e5), link("b", "c", 50)]
    assert chosen("a", "bc", links=links).hops == (EXACT,)
    links = [link("a", "c", 1e5), link("b", "d", 1e5), link("a", "e", 50)]
    assert chosen("ab", "cde", links=links).hops[0].format == "int8"
    links = [link("a", "c", 1e5), link("b", "d", 1e5), link("b", "e", 50)]
    assert chosen("ab", "cde", links=links).hops == (EXACT,)


def test_what_a_stage_receives_is_what_the_one_before_sends() -> None:
    first, second = WireRule(format="int8"), WireRule(format="float16")
    rules = WireRules(sums=(EXACT,) * 3, hops=(first, second))
    assert [rules.before(stage) for stage in range(3)] == [EXACT, first, second]
    assert [rules.after(stage) for stage in range(3)] == [first, second, EXACT]


def test_bytes_of_a_number_on_the_wire() -> None:
    sizes = {wire: number_bytes(wire) for wire in WIRES}
    assert sizes == {"float32": 4, "float16": 2, "int8": 1.125, "auto": 4}


def test_options_know_the_wires() -> None:
    assert LoadOptions().wire == "float32"
    assert [LoadOptions(wire=wire).wire for wire in WIRES] == list(WIRES)
    with pytest.raises(
        RequestError, match="wire must be 'float32', 'float16', 'int8' or 'auto', not"
    ):
        LoadOptions(wire="bfloat16")  # type: ignore[arg-type]
