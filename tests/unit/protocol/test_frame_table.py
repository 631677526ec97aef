"""Frames are read back as they were written, and refused when they are not that."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge import errors
from edge.kernels.sampling.logprobs import Logprobs
from edge.kernels.sampling.parameters import SamplingParameters
from edge.models.towers.part import TowerPart
from edge.offload import Manifest, StoreError
from edge.partition import Plan, Shard, Stage
from edge.protocol import (
    draft_frames,
    graph_frames,
    kv_frames,
    measurements,
    peer_frames,
    prefix_frames,
    session_frames,
    step_frames,
    tower_frames,
    weight_frames,
)
from edge.protocol.assignment import Assignment
from edge.protocol.description import HostedModel, PeerDescription
from edge.protocol.error_codec import Failed
from edge.protocol.fields import from_json, one_line, to_json, token_bytes, token_ids
from edge.protocol.frame_codec import Call, Done, from_frame, table, to_frame
from edge.protocol.frame_table import FRAMES
from edge.protocol.kept_files import AllKept, Keep, KeptFiles
from edge.protocol.lease import Lease
from edge.protocol.session_frames import Connect, Opened
from edge.protocol.step import SamplingTerms, Step, StepEntry, StepLimits
from edge.protocol.step_frames import RunStep
from edge.protocol.step_times import ExpectedStep, ShardTimes, StepTimes, TokenSteps
from edge.protocol.topology import Place
from edge.protocol.weight_frames import Missing
from edge.protocol.wire_rules import WireRules
from edge.transport import Frame, WireRule
from edge.transport.frame import decode, encode
from tests.support.formats import uniform_format
from tests.support.specs import plain_spec
from tests.unit.models.test_towers import made
from tests.unit.protocol.test_measurements import PROBE, PROFILE, TIMES

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

TOWER = made("smolvlm")

WHOLE = Shard(device="d", heads=range(2), ffn_columns=range(32), vocab=range(50))

ASSIGNMENT = Assignment(
    session="s",
    model=SPEC,
    plan=Plan(model="m", version=1, stages=(Stage(layers=range(3), shards=(WHOLE,)),)),
    stage=0,
    rank=0,
    weight_format=uniform_format("int4", 64),
    manifest_digest="0" * 64,
    weights_digest="w",
    kv_dtype="int4",
    limits=StepLimits(context_tokens=50, chunk_tokens=16, requests=4, cached_tokens=50),
    wire_rules=WireRules(sums=(WireRule(),), hops=()),
)

PLACES = {
    (0, 0): Place(name="north", addresses=("10.0.0.1:5", "10.1.0.1:5")),
    (1, 2): Place(name="süd", addresses=("[fe80::1]:7",)),
}
ENTRIES = (
    StepEntry(request="a", position=9, tokens=(1,), logit_rows=1),
    StepEntry(request="b", position=4, tokens=(5,), logit_rows=1),
)
TERMS = SamplingTerms(
    sampling=SamplingParameters(
        temperature=0.5, top_k=3, seed=9, presence_penalty=0.5, logit_bias={3: -1.5, 12: 2.0}
    ),
    end_ids=frozenset({4, 2}),
    max_new_tokens=7,
    logprobs=2,
)
STEP = RunStep(session="s", step=Step(entries=ENTRIES, run=12), terms={"b": TERMS})
CHUNK = StepEntry(request="a", position=0, tokens=(1, 2, 3), logit_rows=0)

FRAMES_SENT = (
    peer_frames.Describe(),
    peer_frames.SetMemory(bytes=5),
    Keep(remove=("shards/x",)),
    measurements.MemoryRate(),
    measurements.Profile(model=SPEC, weight_format=uniform_format("int4", 128, "high")),
    measurements.Prove(weight_format=uniform_format("int4", 128, "high"), seed=3),
    PROBE,
    measurements.Glance(place=PROBE.place, small_bytes=8, large_bytes=9),
    weight_frames.Offer(manifest=Manifest(tensors=(), total_bytes=0)),
    weight_frames.Piece(manifest="m", digest="d", content=b"\x00\xff"),
    weight_frames.Seal(manifest="m"),
    session_frames.Open(
        assignment=ASSIGNMENT,
        lease=Lease(run="r", term=2),
        prefix_secret=bytes(32),
        expected=ExpectedStep(first_s=0.001, last_s=0.25, tokens=4),
    ),
    peer_frames.TakeOver(lease=Lease(run="r", term=1 << 32)),
    Connect(session="s", places=PLACES),
    prefix_frames.MatchPrefix(session="s", request="r", prompt=token_bytes([1, 2])),
    prefix_frames.PrefixMatched(request="r", tokens=4),
    kv_frames.Reserve(session="s", request="r", tokens=4),
    kv_frames.Reserved(request="r", why_not=None),
    STEP,
    RunStep(session="s", step=Step(entries=(CHUNK,))),
    RunStep(session="s", step=Step(entries=ENTRIES), masked=("b",), masks=b"\x05\x01"),
    step_frames.Tokens(tokens=(1, 2), ends=(None, "stop"), last=True, chosen_s=1.5),
    step_frames.Tokens(
        tokens=(1, 2),
        ends=(None, None),
        last=False,
        chosen_s=1.5,
        logprobs=(None, Logprobs(logprob=-0.5, top=((3, -0.25), (2, -0.5)))),
    ),
    step_frames.Tokens(
        tokens=(1, 2), ends=(None, "stop"), last=True, chosen_s=1.5, drafted=3, together=True
    ),
    step_frames.Logits(rows=b"1234"),
    step_frames.States(rows=b"1234"),
    RunStep(session="s", step=Step(entries=ENTRIES[:1], states=True)),
    tower_frames.OpenTower(
        session="s",
        part=TowerPart(tower=TOWER, layers=range(1, 3)),
        weight_format=uniform_format("int8", 32),
        manifest_digest="0" * 64,
    ),
    tower_frames.PutHidden(session="s", height=2, width=3, first=4, rows=b"\0\1\2\3"),
    tower_frames.ReadTile(session="s", height=2, width=3, patches=b"\0\1\2\3"),
    tower_frames.TakeRows(session="s", first=0, last=5),
    tower_frames.CloseTower(session="s"),
    graph_frames.OpenPart(
        session="s",
        model="m.onnx",
        manifest_digest="0" * 64,
        buffer_bytes=1 << 20,
        held_bytes=1 << 16,
        run_limit_s=2.5,
        profile=True,
    ),
    graph_frames.ProfilePart(session="s"),
    graph_frames.ClosePart(session="s"),
    step_frames.PictureRows(session="s", request="r", position=5, rows=b"\0\1\2\3"),
    RunStep(
        session="s",
        step=Step(
            entries=(
                StepEntry(
                    request="r",
                    position=5,
                    tokens=(1 << 52,),
                    logit_rows=0,
                    turns=(3, 4, 5),
                    shift=2,
                    sees_all=True,
                ),
            )
        ),
    ),
    step_frames.YieldRun(session="s"),
    kv_frames.SwapOut(session="s", request="r"),
    kv_frames.SwappedOut(request="r", why_not="full"),
    kv_frames.KvRows(
        parts=(kv_frames.CopiedTokens(request="r", first=5, tokens=2),), rows=b"\0\1\2\3"
    ),
    kv_frames.PutKv(session="s", request="r", first=5, tokens=(7, 8), rows=b"\0\1\2\3"),
    prefix_frames.AskPrefix(session="s", request="r", stage=1, rank=0, point=5),
    prefix_frames.ReadPrefix(
        session="s", request="r", stage=1, rank=0, first=0, last=5, has_states=True, pieces=(0, 3)
    ),
    prefix_frames.PutPrefix(
        session="s",
        request="r",
        first=0,
        last=5,
        has_states=False,
        is_whole=True,
        pieces=(0,),
        content=b"\0\1\2\3\4",
    ),
    RunStep(
        session="s",
        step=Step(
            entries=(StepEntry(request="r", position=5, tokens=(7, 8), logit_rows=0),),
            singly=True,
        ),
    ),
    kv_frames.SaveState(session="s", request="r", tokens=3, place=1),
    step_frames.Finish(session="s", request="r"),
    session_frames.Measure(session="s"),
    session_frames.CountSteps(session="s"),
    session_frames.Observed(session="s", run=3),
    session_frames.Close(session="s", parks=True),
    session_frames.Waits(stage=1, rank=0, received=7, silent_s=1.25),
    session_frames.AskLink(session="s", stage=1, rank=0),
    session_frames.LinkSent(stage=1, rank=0, sent=8),
    peer_frames.Leaving(),
    draft_frames.ServeDrafts(session="s", device="d"),
    draft_frames.AskDrafts(
        session="s",
        source=draft_frames.DraftSource(
            place=Place(name="n", addresses=("10.0.0.1:1",)),
            session="t",
            context_tokens=9,
            vocab_size=8,
            ahead=True,
        ),
    ),
    draft_frames.AskDrafts(session="s", source=None),
    Failed.of(errors.PeerLostError("near", "gone")),
)
DESCRIPTION = PeerDescription(
    id="i",
    epoch=7,
    name="n",
    software="1",
    addresses=("10.0.0.1:1",),
    backend="ort",
    processor="CPU",
    threads=2,
    memory_bytes=9,
    floor_bytes=1,
    free_bytes=8,
    free_now_bytes=7,
    model_free_bytes=8,
    host="h",
    memory_pool="h/7",
    pool_free_bytes=6,
    identity="x",
    arithmetic="y",
    host_memory_bytes=None,
    kv_memory_bytes=3,
    kv_disk_bytes=0,
    kv_prefix_bytes=0,
    kv_beginnings_bytes=4,
    models=(
        HostedModel(
            name="m", dtype="int4", stage=0, rank=0, sums="links", bytes=1, buffer_bytes=2,
            streamed_bytes=3, host_bytes=4, kv_bytes=5, kv_host_bytes=6, kv_disk_bytes=7,
            user="u", slower=1.25,
        ),
    ),
    lacks=("experts",),
)  # fmt: skip
ANSWERS = (
    Done(),
    Opened(weight_bytes=5, rows_agree=True, batches_agree=False, mixes=True),
    session_frames.Connected(kv_digest="d"),
    Missing(digests=("a", "b")),
    DESCRIPTION,
    PROFILE,
    TIMES,
    TIMES.glance,
    measurements.ReadRate(bytes_per_s=1e9),
    measurements.Proof(numbers=bytes(8)),
    ShardTimes(
        prompt=StepTimes(), decode=StepTimes(steps=2, compute_s=0.5), resident_bytes=1,
        peak_bytes=2, kv_written_bytes=3,
    ),
    TokenSteps(steps=3, rows=4, tokens=5, compute_s=0.5),
    session_frames.Gram(content=b"\0\0\x80?"),
    prefix_frames.HeldPrefix(pieces=bytes(12)),
    tower_frames.TileRows(rows=bytes(64)),
    graph_frames.PartOpened(threads=2),
    graph_frames.PartDone(),
    graph_frames.PartProfile(content=b"{}"),
    prefix_frames.PrefixPieces(content=b"\0\1\2\3\4"),
    AllKept(
        files=(
            KeptFiles(
                kind="shards", name="shards/x", model="m", bytes=4, unused_s=1.5, in_use=True
            ),
            KeptFiles(
                kind="packed", name="packed/y", model=None, bytes=0, unused_s=0.0, in_use=False
            ),
        )
    ),
)  # fmt: skip


def travelled(frame: Frame) -> Frame:
    return decode(b"".join(encode(frame)))


@pytest.mark.parametrize("sent", FRAMES_SENT, ids=lambda frame: frame.kind)
def test_a_frame_arrives_as_it_was_sent(sent: Any) -> None:
    assert FRAMES[sent.kind] is type(sent)
    assert from_frame(type(sent), travelled(to_frame(sent.kind, sent))) == sent


@pytest.mark.parametrize("sent", ANSWERS, ids=lambda answer: type(answer).__name__)
def test_an_answer_arrives_as_it_was_sent(sent: Any) -> None:
    assert from_frame(type(sent), travelled(to_frame("ok", sent, call=3))) == sent


def test_every_frame_and_every_answer_is_tried_here() -> None:
    assert {type(sent) for sent in FRAMES_SENT} == set(FRAMES.values())
    calls = [each for each in FRAMES.values() if issubclass(each, Call)]
    assert {call.answer() for call in calls} == {type(answer) for answer in ANSWERS}
    assert all(call.limit_s > 0 for call in calls)


def test_a_new_frame_is_a_dataclass_and_a_line_in_the_table() -> None:
    @dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
    class Pair:
        first: int
        second: float | None

    @dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
    class Add(Call[Pair]):
        kind, limit_s = "add", 1.0
        numbers: tuple[int, ...]

    frames = table((*FRAMES.values(), Add))
    frame = travelled(to_frame("add", Add(numbers=(1, 2)), call=7))
    assert frame.header == {"call": 7, "numbers": [1, 2]}
    assert from_frame(frames["add"], frame) == Add(numbers=(1, 2))
    assert Add.answer() is Pair


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=10,
)


@pytest.mark.parametrize("sent", FRAMES_SENT, ids=lambda frame: frame.kind)
@settings(max_examples=10)  # of each frame
@given(data=st.data(), payload=st.none() | st.binary(max_size=64))
def test_no_frame_can_do_more_than_be_refused(
    sent: Any, data: st.DataObject, payload: bytes | None
) -> None:
    frame = to_frame(sent.kind, sent)
    names = st.sampled_from(sorted(frame.header) or ["none"])
    header = {**frame.header, **data.draw(st.dictionaries(names, JSON))}
    try:
        from_frame(
            type(sent), Frame(sent.kind, header, frame.payload if payload is None else payload)
        )
    except (errors.EdgeError, StoreError) as error:
        assert str(error)  # noqa: PT017 - anything else than this error or none fails the test


@given(change=st.dictionaries(st.sampled_from(sorted(to_json(ASSIGNMENT))), JSON))
def test_no_assignment_can_do_more_than_be_refused(change: dict[str, Any]) -> None:
    try:
        from_json(Assignment, to_json(ASSIGNMENT) | change)
    except errors.ProtocolError as error:
        assert str(error)  # noqa: PT017


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
        {"weight_format": None},
        {
            "weight_format": uniform_format("int4").to_json()
            | {"kinds": [{"kind": "blocks", "code_bits": 5, "block_size": 32}]}
        },
        {
            "weight_format": uniform_format("int4").to_json()
            | {"kinds": [{"kind": "blocks", "code_bits": 4, "block_size": 7}]}
        },
        {"manifest_digest": 5},
        {"model": None},
        {"model": {}},
        {"plan": []},
        {"plan": {"stages": "many"}},
        {"limits": None},
        {"limits": {"context_tokens": 50}},
        {"kv_dtype": "float16"},
        {"kv_dtype": None},
        {"wire_rules": None},
        {"wire_rules": {"sums": []}},
    ],
    ids=repr,
)
def test_an_assignment_that_cannot_be(change: dict[str, Any]) -> None:
    with pytest.raises(errors.ProtocolError):
        from_json(Assignment, to_json(ASSIGNMENT) | change)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("context_tokens", 101, "the model has 100"),
        ("context_tokens", 0, "a context of 0 tokens"),
        ("chunk_tokens", 0, "chunks of 0 tokens"),
        ("chunk_tokens", 5000, "1 to 4096"),
        ("requests", 0, "0 requests at once"),
        ("saved_states", 65, "65 places for states"),
        ("requests", 10**6, "1 to 1024"),
        ("cached_tokens", 49, "neither memory nor disk has room"),
        ("cached_tokens", 0, "no memory for the keys and values"),
    ],
)
def test_limits_that_cannot_be(name: str, value: int, message: str) -> None:
    written = to_json(ASSIGNMENT)
    with pytest.raises(errors.ProtocolError, match=message):
        from_json(Assignment, written | {"limits": written["limits"] | {name: value}})


@pytest.mark.parametrize(
    "places",
    [
        5,
        {},
        [5],
        [[[0, 0]]],
        [[[0], {"name": "n", "addresses": ["10.0.0.1:1"]}]],
        [[[0, 0], {}]],
        [[[0, 0], {"name": "n", "addresses": []}]],
        [[[0, 0], {"name": "n", "addresses": ["10.0.0.1:1"] * 65}]],
        [[[0, 0], {"name": "n", "addresses": "10.0.0.1:1"}]],
        [[[0, 0], {"name": "n", "addresses": [5]}]],
        [[[0, 0], {"name": "n", "addresses": ["nowhere"]}]],
        [[[0, 0], {"name": "n", "addresses": ["127.1:1"]}]],
        [[[0, 0], {"name": "", "addresses": ["10.0.0.1:1"]}]],
        [[[-1, 0], {"name": "n", "addresses": ["10.0.0.1:1"]}]],
    ],
    ids=repr,
)
def test_places_that_cannot_be(places: object) -> None:
    with pytest.raises(errors.ProtocolError, match="a malformed 'connect'"):
        from_frame(Connect, Frame("connect", {"session": "s", "places": places}))


@pytest.mark.parametrize("frame", ["connect", "probe", "glance", "description"])
@pytest.mark.parametrize("host", ["named.by.a.member", "localhost", "127.1", "", "[attic]"])
def test_whoever_is_told_an_address_asks_for_no_name(frame: str, host: str) -> None:
    """Of whomever the teller likes; a number leads to one device."""

    def read(host: str) -> None:
        place = {"name": "n", "addresses": [f"{host}:1"], "device": "d"}
        sizes = {"small_bytes": 8, "large_bytes": 9}
        if frame == "connect":
            from_frame(Connect, Frame(frame, {"session": "s", "places": [[[0, 0], place]]}))
        elif frame == "description":
            said = to_json(DESCRIPTION) | {"addresses": [f"{host}:1"]}
            from_json(PeerDescription, said)
        else:
            from_frame(FRAMES[frame], Frame(frame, {"place": place, **sizes}))

    read("10.0.0.1")
    read("[fe80::1%eth0]")
    with pytest.raises(errors.ProtocolError):
        read(host)


@pytest.mark.parametrize(
    "change",
    [
        {"sampling": None},
        {"sampling": {"temperature": -1}},
        {"sampling": {"heat": 1}},
        {"sampling": {"logit_bias": {"x": 1}}},
        {"sampling": {"logit_bias": {"-1": 1}}},
        {"sampling": {"logit_bias": {"1": 1e39}}},
        {"sampling": {"logit_bias": {"1": "2"}}},
        {"sampling": {"logit_bias": [1]}},
        {"sampling": {"logit_bias": {str(each): 0 for each in range(1025)}}},
        {"sampling": {"frequency_penalty": 2.5}},
        {"prompt_tokens": -1},
        {"end_ids": None},
        {"end_ids": ["x"]},
        {"max_new_tokens": -1},
        {"max_new_tokens": "7"},
        {"logprobs": 21},
        {"logprobs": -1},
        {"logprobs": "2"},
    ],
    ids=repr,
)
def test_sampling_terms_that_cannot_be(change: dict[str, Any]) -> None:
    header = to_frame("step", STEP).header
    with pytest.raises(errors.ProtocolError, match="a malformed 'step'"):
        from_frame(RunStep, Frame("step", {**header, "terms": {"b": to_json(TERMS) | change}}))


def test_terms_of_a_request_that_is_not_in_the_step() -> None:
    header = to_frame("step", STEP).header
    with pytest.raises(errors.ProtocolError, match="not in the step"):
        from_frame(RunStep, Frame("step", {**header, "terms": {"c": to_json(TERMS)}}))


def test_tokens_of_a_request_that_wants_hidden_states() -> None:
    header = to_frame("step", STEP).header
    step = step_of([entry(request="b")], states=True)
    with pytest.raises(errors.ProtocolError, match="a step for hidden states"):
        from_frame(RunStep, Frame("step", {**header, "step": step}))


def step_of(entries: list[Any], **changes: Any) -> dict[str, Any]:
    others = {"run": 1, "singly": False, "states": False, "drafts": 0, "spare": 0, "rest": []}
    return {"entries": entries, **others, **changes}


def entry(**changes: Any) -> dict[str, Any]:
    more = {"turns": [], "shift": 0, "sees_all": False}
    return {"request": "a", "position": 0, "tokens": [1], "logit_rows": 1} | more | changes


@pytest.mark.parametrize(
    "step",
    [
        {},
        step_of([]),
        {"entries": [entry()]},
        step_of([entry()], run=0),
        step_of([entry(tokens=[1, 2], logit_rows=2)], run=2),
        step_of([entry()], run=2, states=True),
        step_of([entry(logit_rows=0)], states=True),
        step_of([entry(), entry(request="b")], states=True),
        step_of([entry()], singly=True, states=True),
        step_of([entry()], states=1),
        step_of([entry(logit_rows=2)]),
        step_of([entry(tokens=[], logit_rows=0)]),
        step_of([entry(tokens=[1] * 4097, logit_rows=0)]),
        step_of([entry(tokens=[1.5])]),
        step_of([entry(position=-1)]),
        step_of([entry(), entry(position=1)]),
        step_of([entry(tokens=[1, 2]), entry(request="b")]),
        step_of([entry(tokens=[1, 2]), entry(request="b", tokens=[1, 2])]),
        step_of([entry(), entry(request="b", tokens=[1, 2])], run=2),
        step_of([entry(), entry(request="b", tokens=[1, 2], logit_rows=0)], run=2, rest=[1]),
        step_of([entry(), entry(request="b", tokens=[1, 2], logit_rows=0)], rest=[1, 2]),
        step_of([entry(), entry(request="b", tokens=[1, 2])], run=2, rest=[1, 2]),
        step_of([entry(), entry(request="b", tokens=[1, 2])], drafts=1),
        step_of([entry(), entry(request="b", tokens=[1, 2], logit_rows=2)]),
        step_of([entry(), entry(request="b", tokens=[1] * 4096)]),
        step_of([entry(), entry(request="a", tokens=[1, 2])]),
        step_of([entry()], rest=[1]),
        step_of(["a"]),
        step_of([entry(request=str(each)) for each in range(1025)]),
        step_of([entry(tokens=[1, 2, 3], logit_rows=2)], run=9, drafts=3),
        step_of([entry(tokens=[1, 2, 3], logit_rows=3)], run=9, drafts=1),
        step_of([entry(logit_rows=0)], run=9, drafts=1),
        step_of([entry(), entry(request="b")], run=9, drafts=1),
        step_of([entry()], run=9, drafts=16),
        step_of([entry()], spare=1),
        step_of([entry(tokens=[1, 2], logit_rows=1)], spare=1),
        step_of([entry(tokens=[1, 2], logit_rows=0)], spare=2),
    ],
    ids=lambda step: json.dumps(step)[:60],
)
def test_a_step_that_cannot_be(step: dict[str, Any]) -> None:
    with pytest.raises(errors.ProtocolError, match="a malformed 'step'"):
        from_frame(RunStep, Frame("step", {"session": "s", "step": step, "terms": {}}))


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (errors.RequestError("no"), errors.RequestError, "peer far: no"),
        (
            errors.RequestError("top_p must be at most 1, not 'a; b'"),
            errors.RequestError,
            "peer far: top_p must be at most 1, not 'a; b'",
        ),
        (
            errors.CapacityError("/a; b is full", remedy="remove something"),
            errors.CapacityError,
            "peer far: /a; b is full; remove something",
        ),
        (
            errors.PeerLostError("near", "it; left", remedy="start it"),
            errors.PeerLostError,
            "peer near: it; left; start it",
        ),
        (
            errors.EdgeError("x; y", remedy="z"),
            errors.PeerError,
            "peer far: x; y; z",
        ),
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
    arrived = from_frame(Failed, travelled(to_frame("failed", Failed.of(error))))
    raised = arrived.as_error("far")
    assert type(raised) is kind
    assert str(raised) == message
    assert raised.remedy == (error.remedy if isinstance(error, errors.EdgeError) else "")
    if isinstance(error, errors.PeerLostError):
        assert isinstance(raised, errors.PeerLostError)
        assert raised.peer == "near"


@pytest.mark.parametrize(
    "header",
    [
        {"error": "unknown", "message": "m", "remedy": None, "peer": None},
        {"error": ["x"], "message": None, "remedy": None, "peer": None},
        {"error": "lost", "message": "m", "remedy": None, "peer": None},
        {"error": "peer", "message": "m", "remedy": ["x"], "peer": None},
    ],
    ids=repr,
)
def test_a_failure_of_a_kind_nobody_knows_is_still_a_peers_error(header: dict[str, Any]) -> None:
    try:
        raised: errors.EdgeError = from_frame(Failed, Frame("failed", header)).as_error("far")
    except errors.ProtocolError as error:
        raised = error
    assert isinstance(raised, errors.PeerError | errors.ProtocolError)


def test_long_and_wild_messages_are_tamed() -> None:
    wild = errors.RequestError("\x1b[2J\n" + "x" * 10_000_000, remedy="\x1b[2J" * 1_000_000)
    failed = Failed.of(wild)
    assert len(failed.message) < 10_000
    assert failed.remedy is not None
    assert len(failed.remedy) < 10_000
    header = {"error": "request", "message": str(wild), "remedy": wild.remedy, "peer": None}
    raised = str(from_frame(Failed, Frame("failed", header)).as_error("far"))
    assert raised.isprintable()
    assert len(raised) < 10_000


@given(st.text())
def test_what_is_printed_is_printable(value: str) -> None:
    shown = one_line(value)
    assert shown.isprintable()
    assert 0 < len(shown) <= 200


def test_a_prompt_arrives_as_it_was() -> None:
    prompt = [0, 49, 7]
    payload = token_bytes(prompt)
    assert token_ids(payload, 50, most_tokens=3).tolist() == prompt


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b"", "at least one"),
        (b"abc", "no whole number of token ids"),
        (token_bytes([50]), "all of them below 50"),
        (token_bytes([-1]), "all of them below 50"),
        (bytes(32), "of at most"),
    ],
)
def test_what_is_no_prompt(payload: bytes, message: str) -> None:
    with pytest.raises(errors.ProtocolError, match=message):
        token_ids(payload, 50, most_tokens=3)
