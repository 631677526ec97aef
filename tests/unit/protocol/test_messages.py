"""What peers say to each other: read back as it was written, and refused when it is not that."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge import errors
from edge.protocol import messages
from edge.protocol.messages import Assignment, Place, SamplingTerms
from edge.protocol.step import Step, StepEntry, StepLimits
from edge.protocol.wire_rules import WireRules
from edge.weights.formats import weight_format
from kernels.sampling.parameters import SamplingParameters
from partition import Plan, Shard, Stage
from tests.support.specs import plain_spec
from transport import WireRule

SPEC = plain_spec(
    num_layers=3,
    hidden_size=16,
    num_heads=2,
    num_kv_heads=1,
    ffn_columns=32,
    vocab_size=50,
    context_tokens=100,
    inverse_frequencies=(1.0, 0.5, 0.25, 0.125),
    windows=(None, 4, None),
    tied_embeddings=True,
)

WHOLE = Shard(device="d", heads=range(2), ffn_columns=range(32), vocab=range(50))

ASSIGNMENT = Assignment(
    session="s",
    model=SPEC,
    plan=Plan(model="m", version=1, stages=(Stage(layers=range(3), shards=(WHOLE,)),)),
    stage=0,
    rank=0,
    weight_format=weight_format("int4", 64),
    manifest_digest="0" * 64,
    weights_digest="w",
    kv_dtype="int4",
    limits=StepLimits(context_tokens=50, chunk_tokens=16, requests=4, cached_tokens=50),
    wire_rules=WireRules(sums=(WireRule(),), hops=()),
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=10,
)


def test_an_assignment_is_read_as_it_was_written() -> None:
    assert Assignment.from_payload(ASSIGNMENT.to_payload()) == ASSIGNMENT
    assert Assignment.from_payload(bytearray(ASSIGNMENT.to_payload())) == ASSIGNMENT


@pytest.mark.parametrize(
    "change",
    [
        {"stage": 1},
        {"rank": 1},
        {"rank": -1},
        {"stage": 0.0},
        {"session": ""},
        {"session": "s" * 1025},
        {"session": None},
        {"dtype": "fp4"},
        {"block_size": 7},
        {"manifest": 5},
        {"model": None},
        {"model": {}},
        {"plan": []},
        {"plan": {"stages": "many"}},
        {"limits": None},
        {"limits": {"context_tokens": 50}},
        {"kv_dtype": "float16"},
        {"kv_dtype": None},
        {"wire": None},
        {"wire": {"sums": []}},
    ],
    ids=repr,
)
def test_an_assignment_that_cannot_be(change: dict[str, Any]) -> None:
    value = json.loads(ASSIGNMENT.to_payload()) | change
    with pytest.raises(errors.EdgeError):
        Assignment.from_payload(json.dumps(value).encode())


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("context_tokens", 101, "the model has 100"),
        ("context_tokens", 0, "a context of 0 tokens"),
        ("chunk_tokens", 0, "chunks of 0 tokens"),
        ("chunk_tokens", 5000, "1 to 4096"),
        ("requests", 0, "0 requests at once"),
        ("requests", 10**6, "1 to 1024"),
        ("cached_tokens", 49, "fewer tokens than one request"),
    ],
)
def test_limits_that_cannot_be(name: str, value: int, message: str) -> None:
    limits = dataclasses.replace(ASSIGNMENT.limits, **{name: value})
    with pytest.raises(errors.ProtocolError, match=message):
        Assignment.from_payload(dataclasses.replace(ASSIGNMENT, limits=limits).to_payload())


@given(change=st.dictionaries(st.sampled_from(sorted(json.loads(ASSIGNMENT.to_payload()))), JSON))
def test_no_assignment_can_do_more_than_be_refused(change: dict[str, Any]) -> None:
    payload = json.dumps(json.loads(ASSIGNMENT.to_payload()) | change).encode()
    try:
        Assignment.from_payload(payload)
    except errors.EdgeError as error:
        assert str(error)  # noqa: PT017 - anything else than this error or none fails the test


@given(payload=st.binary(max_size=64) | JSON.map(lambda value: json.dumps(value).encode()))
def test_no_payload_can_do_more_than_be_refused(payload: bytes) -> None:
    for read in (Assignment.from_payload, messages.places_from_payload):
        try:
            read(payload)
        except errors.EdgeError as error:
            assert str(error)  # noqa: PT017


def test_places_are_read_as_they_were_written() -> None:
    places = {
        (0, 0): Place(name="north", addresses=("10.0.0.1:5", "10.1.0.1:5")),
        (1, 2): Place(name="süd", addresses=("[fe80::1]:7",)),
    }
    assert messages.places_from_payload(messages.places_to_payload(places)) == places


@pytest.mark.parametrize(
    "entry",
    [
        5,
        {},
        {"stage": 0, "rank": 0, "name": "n", "addresses": []},
        {"stage": 0, "rank": 0, "name": "n", "addresses": ["a:1"] * 65},
        {"stage": 0, "rank": 0, "name": "n", "addresses": "a:1"},
        {"stage": 0, "rank": 0, "name": "n", "addresses": [5]},
        {"stage": 0, "rank": 0, "name": "", "addresses": ["a:1"]},
        {"stage": -1, "rank": 0, "name": "n", "addresses": ["a:1"]},
    ],
    ids=repr,
)
def test_places_that_cannot_be(entry: object) -> None:
    with pytest.raises(errors.ProtocolError):
        messages.places_from_payload(json.dumps([entry]).encode())


def test_sampling_terms_are_read_as_they_were_written() -> None:
    terms = SamplingTerms(
        sampling=SamplingParameters(temperature=0.5, top_k=3, seed=9),
        end_ids=frozenset({4, 2}),
        max_new_tokens=7,
    )
    assert SamplingTerms.from_header(json.loads(json.dumps(terms.to_header()))) == terms


@pytest.mark.parametrize(
    "change",
    [
        {"sampling": None},
        {"sampling": {"temperature": -1}},
        {"sampling": {"heat": 1}},
        {"end_ids": None},
        {"end_ids": ["x"]},
        {"max_new_tokens": -1},
        {"max_new_tokens": "7"},
    ],
    ids=repr,
)
def test_sampling_terms_that_cannot_be(change: dict[str, Any]) -> None:
    terms = SamplingTerms(
        sampling=SamplingParameters(), end_ids=frozenset(), max_new_tokens=7
    ).to_header()
    with pytest.raises(errors.ProtocolError):
        SamplingTerms.from_header(terms | change)


STEPS = [
    Step(entries=(StepEntry(request="a", position=0, tokens=(1, 2, 3), logit_rows=0),)),
    Step(entries=(StepEntry(request="a", position=0, tokens=(1, 2, 3), logit_rows=3),)),
    Step(
        entries=(
            StepEntry(request="a", position=9, tokens=(1,), logit_rows=1),
            StepEntry(request="b", position=4, tokens=(5,), logit_rows=1),
        ),
        run=12,
    ),
]


@pytest.mark.parametrize("step", STEPS, ids=["chunk", "logits", "batch"])
def test_a_step_is_read_as_it_was_written(step: Step) -> None:
    assert messages.step_from_header(json.loads(json.dumps(messages.step_to_header(step)))) == step


@pytest.mark.parametrize(
    "header",
    [
        {},
        {"entries": [], "run": 1},
        {"entries": [["a", 0, [1], 1]]},
        {"entries": [["a", 0, [1], 1]], "run": 0},
        {"entries": [["a", 0, [1, 2], 2]], "run": 2},
        {"entries": [["a", 0, [1], 2]], "run": 1},
        {"entries": [["a", 0, [], 0]], "run": 1},
        {"entries": [["a", 0, [1] * 4097, 0]], "run": 1},
        {"entries": [["a", 0, [1.5], 0]], "run": 1},
        {"entries": [["a", -1, [1], 0]], "run": 1},
        {"entries": [["a", 0, [1], 0], ["a", 1, [1], 0]], "run": 1},
        {"entries": [["a", 0, [1], 0], ["b", 1, [1, 2], 0]], "run": 1},
        {"entries": [["a", 0, [1]]], "run": 1},
        {"entries": ["a"], "run": 1},
        {"entries": [["a", 0, [1], 1]] * 1025, "run": 1},
    ],
    ids=lambda header: json.dumps(header)[:60],
)
def test_a_step_that_cannot_be(header: dict[str, Any]) -> None:
    with pytest.raises(errors.ProtocolError):
        messages.step_from_header(header)


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (errors.RequestError("no"), errors.RequestError, "peer far: no"),
        (errors.CapacityError("full"), errors.CapacityError, "peer far: full"),
        (errors.PlanError("wrong"), errors.PlanError, "peer far: wrong"),
        (errors.CheckpointError("torn"), errors.CheckpointError, "peer far: torn"),
        (errors.ProtocolError("what?"), errors.ProtocolError, "peer far: what?"),
        (errors.NetworkError("cut"), errors.PeerError, "peer far: cut"),
        (errors.PeerError("sampler", "NaN"), errors.PeerError, "peer far: NaN"),
        (errors.PeerLostError("near", "gone"), errors.PeerLostError, "peer near: gone"),
        (ZeroDivisionError("by 0"), errors.PeerError, "peer far: ZeroDivisionError: by 0"),
    ],
)
def test_an_error_arrives_as_its_kind_and_names_its_peer(
    error: Exception, kind: type[Exception], message: str
) -> None:
    header = json.loads(json.dumps(messages.error_to_header(error)))
    raised = messages.error_from_header("far", header)
    assert type(raised) is kind
    assert str(raised) == message
    if isinstance(error, errors.PeerLostError):
        assert isinstance(raised, errors.PeerLostError)
        assert raised.peer == "near"


@pytest.mark.parametrize(
    "header",
    [{}, {"error": ["x"]}, {"error": "unknown", "message": None}, {"error": "lost", "peer": {}}],
    ids=repr,
)
def test_a_failure_that_says_nothing_of_use_is_still_a_peers_error(header: dict[str, Any]) -> None:
    assert isinstance(messages.error_from_header("far", header), errors.PeerError)


def test_long_and_wild_messages_are_tamed() -> None:
    wild = errors.RequestError("\x1b[2J\n" + "x" * 10_000_000)
    header = messages.error_to_header(wild)
    assert len(header["message"]) < 10_000
    raised = str(messages.error_from_header("far", {"error": "request", "message": str(wild)}))
    assert raised.isprintable()
    assert len(raised) < 10_000


@given(st.text())
def test_what_is_printed_is_printable(value: str) -> None:
    shown = messages.printable(value)
    assert shown.isprintable()
    assert 0 < len(shown) <= 200


def test_a_prompt_arrives_as_it_was() -> None:
    prompt = [0, 49, 7]
    payload = messages.prompt_to_payload(prompt)
    assert messages.prompt_from_payload(payload, 50, most_tokens=3) == tuple(prompt)


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b"", "at least one"),
        (b"abc", "whole numbers of 4 bytes"),
        (messages.prompt_to_payload([50]), "a vocabulary of 50"),
        (messages.prompt_to_payload([-1]), "a vocabulary of 50"),
        (bytes(16), "longer than the context"),
    ],
)
def test_what_is_no_prompt(payload: bytes, message: str) -> None:
    with pytest.raises(errors.ProtocolError, match=message):
        messages.prompt_from_payload(payload, 50, most_tokens=3)
