"""Orders to measure and their answers: read as they were written, and nonsense is not let in."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from edge.errors import ProtocolError
from edge.partition import ComputeRates
from edge.protocol.fields import from_json, to_json
from edge.protocol.measurements import (
    MAX_MESSAGE_BYTES,
    LinkGlance,
    LinkTimes,
    PeerProfile,
    Probe,
    Profile,
    Span,
)
from edge.protocol.topology import Place
from tests.support.formats import uniform_format
from tests.unit.protocol.test_assignment import SPEC

RATES = ComputeRates(
    rows=(1, 4),
    seconds_per_byte=(1e-10, 2e-10),
    shared_seconds_per_byte=(1e-10, 3e-10),
    slice_seconds_per_byte=(1e-10, 2e-10),
    attention_slice_s=(2e-6, 3e-6),
    feed_forward_slice_s=(1e-6, 2e-6),
    attention_s=(1e-8, 1e-8),
    run_s=2e-5,
    jitter=0.1,
    sample_s=1e-5,
    step_s=1e-4,
    disk_bytes_per_s=None,
)
FORMAT = uniform_format("int4").to_json()

PROFILE = PeerProfile(
    rates=RATES,
    sample_bytes=1000,
    sample="2 layers",
    spread=0.1,
    is_unsteady=False,
    busy=("m",),
)
PROBE = Probe(
    place=Place(name="b", addresses=("10.0.0.1:1", "[::1]:2")), small_bytes=8, large_bytes=9
)
ECHO = Span(low_s=2e-4, middle_s=2.1e-4, high_s=2.2e-4)
GLANCE = LinkGlance(echo_s=ECHO, there_s=ECHO, back_s=Span(low_s=1e-3, middle_s=1e-3, high_s=2e-3))
TIMES = LinkTimes(latency_s=1e-4, there_bytes_per_s=1e8, back_bytes_per_s=2e8, glance=GLANCE)


@pytest.mark.parametrize(
    "change",
    [
        {"model": None},
        {"model": {}},
        {"model": {**SPEC.to_json(), "num_heads": 10**400}},
        {"model": {**SPEC.to_json(), "hidden_size": 1 << 40}},
        {"weight_format": FORMAT | {"code_bits": 3}},
        {"weight_format": FORMAT | {"block_size": 7}},
        {"weight_format": FORMAT | {"block_size": 32.0}},
        {"weight_format": FORMAT | {"block_size": "32"}},
        {"weight_format": FORMAT | {"accuracy": None}},
        {"weight_format": {"name": "int4", "kind": "blocks"}},
        {"weight_format": None},
    ],
    ids=lambda change: str(change)[:40],
)
def test_an_order_to_measure_that_makes_no_sense(change: dict[str, Any]) -> None:
    order = Profile(model=SPEC, weight_format=uniform_format("int4"))
    with pytest.raises(ProtocolError):
        from_json(Profile, to_json(order) | change)


@pytest.mark.parametrize(
    "change",
    [
        {"addresses": []},
        {"addresses": "10.0.0.1:1"},
        {"addresses": ["10.0.0.1:1"] * 65},
        {"addresses": [5]},
        {"name": ""},
        {"small_bytes": 0},
        {"small_bytes": 10},
        {"large_bytes": MAX_MESSAGE_BYTES + 1},
        {"large_bytes": 9.0},
    ],
    ids=lambda change: str(change)[:40],
)
def test_an_order_to_probe_that_makes_no_sense(change: dict[str, Any]) -> None:
    value = to_json(PROBE)
    for name, each in change.items():
        (value["place"] if name in value["place"] else value)[name] = each
    with pytest.raises(ProtocolError):
        from_json(Probe, value)


@pytest.mark.parametrize(
    "change",
    [
        {"rates": None},
        {"rates": {**to_json(RATES), "run_s": -1}},
        {"rates": {**to_json(RATES), "rows": [1, 1]}},
        {"rates": {**to_json(RATES), "seconds_per_byte": [0, 1e-10]}},
        {"rates": {**to_json(RATES), "slice_seconds_per_byte": [0, 1e-10]}},
        {"rates": {**to_json(RATES), "slice_seconds_per_byte": [1e-10, 5e-10]}},
        {"sample_bytes": 0},
        {"sample_bytes": 1.5},
        {"sample": ["x"]},
        {"spread": "much"},
        {"spread": float("nan")},
        {"spread": -1},
        {"spread": 10**400},
        {"spread": True},
        {"is_unsteady": 0},
        {"busy": "m"},
        {"busy": [5]},
        {"busy": ["m"] * 100},
    ],
    ids=lambda change: str(change)[:40],
)
def test_a_profile_that_makes_no_sense(change: dict[str, Any]) -> None:
    with pytest.raises((ProtocolError, ValueError)):
        from_json(PeerProfile, {**to_json(PROFILE), **change})


def test_names_in_a_profile_cannot_write_on_our_terminal() -> None:
    evil = replace(PROFILE, sample="a\x1b[2J", busy=("b\n",))
    found = from_json(PeerProfile, to_json(evil))
    assert found.sample.isprintable()
    assert all(name.isprintable() for name in found.busy)


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {},
        {**to_json(TIMES), "latency_s": -1},
        {**to_json(TIMES), "latency_s": float("inf")},
        {**to_json(TIMES), "there_bytes_per_s": 0},
        {**to_json(TIMES), "is_unsteady": 1},
        {**to_json(TIMES), "glance": None},
        {
            **to_json(TIMES),
            "glance": {**to_json(GLANCE), "echo_s": {"low_s": 1.0, "middle_s": 2.0}},
        },
        {
            **to_json(TIMES),
            "glance": {
                **to_json(GLANCE),
                "there_s": {"low_s": 1.0, "middle_s": 3.0, "high_s": 2.0},
            },
        },
        {
            **to_json(TIMES),
            "glance": {
                **to_json(GLANCE),
                "back_s": {"low_s": -1.0, "middle_s": 2.0, "high_s": 3.0},
            },
        },
        {**to_json(TIMES), "back_bytes_per_s": "fast"},
    ],
    ids=str,
)
def test_link_times_that_make_no_sense(value: Any) -> None:
    with pytest.raises(ProtocolError):
        from_json(LinkTimes, value)


def spanned(low_ms: float, middle_ms: float, high_ms: float) -> Span:
    return Span(low_s=low_ms / 1e3, middle_s=middle_ms / 1e3, high_s=high_ms / 1e3)


@pytest.mark.parametrize(
    ("before", "now", "differs"),
    [
        ((1.0, 1.0, 1.1), (1.0, 1.0, 1.1), False),
        ((1.0, 1.0, 1.1), (1.4, 1.4, 1.4), False),
        ((1.0, 1.0, 1.1), (1.6, 1.6, 1.6), True),
        ((0.5, 1.0, 1.1), (1.6, 1.6, 1.6), False),  # it was as far apart by itself
        ((0.1, 1.0, 2.0), (3.1, 3.1, 3.1), True),  # however far it was
        ((0.01, 0.01, 0.01), (0.05, 0.05, 0.05), False),  # too short for a plan
        ((0.0, 0.0, 0.0), (0.1, 0.1, 0.1), True),
    ],
)
def test_a_time_differs_by_more_than_its_own_spread(
    before: tuple[float, float, float], now: tuple[float, float, float], differs: bool
) -> None:
    assert spanned(*before).differs(spanned(*now)) is differs
    assert spanned(*now).differs(spanned(*before)) is differs


def test_a_link_differs_in_any_of_its_times() -> None:
    assert not GLANCE.differs(GLANCE)
    for name in ("echo_s", "there_s", "back_s"):
        changed = replace(GLANCE, **{name: spanned(9, 9, 9)})
        assert GLANCE.differs(changed)
        assert changed.differs(GLANCE)


def test_a_link_that_is_not_steady_differs_by_more() -> None:
    rough = replace(TIMES, is_unsteady=True)
    for times, differs_s in ((2, (True, False)), (4, (True, True))):
        echo = GLANCE.echo_s
        now = spanned(*(1e3 * times * each for each in (echo.low_s, echo.middle_s, echo.high_s)))
        glance = replace(GLANCE, echo_s=now)
        assert (TIMES.differs_from(glance), rough.differs_from(glance)) == differs_s


def test_rates_are_read_as_they_were_written() -> None:
    for rates in (RATES, replace(RATES, disk_bytes_per_s=1e9, expert_s=1e-4)):
        assert from_json(ComputeRates, json.loads(json.dumps(to_json(rates)))) == rates


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rows", [2, 4]),
        ("rows", [4, 4]),
        ("rows", [1, 4.0]),
        ("rows", [1, 10**9]),
        ("rows", []),
        ("rows", "1"),
        ("seconds_per_byte", [1.0, -4.0]),
        ("seconds_per_byte", [1.0, math.nan]),
        ("seconds_per_byte", [1.0, True]),
        ("seconds_per_byte", [1.0, 10**400]),
        ("shared_seconds_per_byte", [1.0]),
        ("slice_seconds_per_byte", [1.0, 2.0, 3.0]),
        ("attention_slice_s", [1.0, -1.0]),
        ("feed_forward_slice_s", None),
        ("attention_s", [0.0] * 65),
        ("attention_s", None),
        ("run_s", math.inf),
        ("jitter", -0.1),
        ("sample_s", "0"),
        ("step_s", None),
        ("expert_s", -1e-9),
        ("disk_bytes_per_s", 0),
    ],
)
def test_rates_that_cannot_be(name: str, value: object) -> None:
    with pytest.raises(ProtocolError):
        from_json(ComputeRates, {**to_json(RATES), name: value})


@pytest.mark.parametrize("value", [None, [], {}, {"rows": [1]}])
def test_rates_of_another_shape(value: object) -> None:
    with pytest.raises(ProtocolError):
        from_json(ComputeRates, value)
