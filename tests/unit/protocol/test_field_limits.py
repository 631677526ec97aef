"""What a record holds has a limit, checked before each item is read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from edge.errors import ProtocolError
from edge.offload import Manifest, StoreCorruptError
from edge.offload.files.manifest import MAX_TENSORS
from edge.protocol import session_frames, step_frames, weight_frames
from edge.protocol.frame_codec import from_frame, to_frame
from edge.protocol.frame_table import FRAMES, limits_of
from edge.protocol.step import MAX_END_IDS, MAX_REQUESTS
from edge.transport import Frame

ENTRY = {
    "request": "r",
    "position": 0,
    "tokens": [1],
    "logit_rows": 1,
    "turns": [],
    "shift": 0,
    "sees_all": False,
}
TERMS: dict[str, Any] = {
    "sampling": {},
    "end_ids": [],
    "max_new_tokens": 1,
    "prompt_tokens": 0,
    "logprobs": None,
    "speculate": "off",
}


def step(entries: list[Any], terms: dict[str, Any]) -> Frame:
    computed = {
        "entries": entries,
        "run": 1,
        "singly": False,
        "states": False,
        "drafts": 0,
        "spare": 0,
        "rest": [],
    }
    return Frame("step", {"session": "s", "step": computed, "terms": terms, "masked": []})


def test_a_reply_ends_with_few_tokens() -> None:
    most = list(range(MAX_END_IDS))
    from_frame(step_frames.RunStep, step([ENTRY], {"r": TERMS | {"end_ids": most}}))
    with pytest.raises(
        ProtocolError, match=f"end_ids: Expected `array` of length <= {MAX_END_IDS}"
    ):
        from_frame(step_frames.RunStep, step([ENTRY], {"r": TERMS | {"end_ids": [*most, 99]}}))


@pytest.mark.parametrize(
    ("frame", "name"),
    [
        (step([ENTRY] * (MAX_REQUESTS + 1), {}), "entries"),
        (step([ENTRY | {"tokens": [1] * 4097}], {}), "tokens"),
        (step([ENTRY], {str(number): TERMS for number in range(MAX_REQUESTS + 1)}), "terms"),
        (Frame("connect", {"session": "s", "places": [[[0, 0], {}]] * 1025}), "places"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_long_lists(frame: Frame, name: str) -> None:
    with pytest.raises(ProtocolError, match=rf"{name}: Expected `(array|object)` of length <= \d+"):
        from_frame(FRAMES[frame.kind], frame)


def test_a_large_value_is_not_repeated_in_what_is_said_of_it() -> None:
    deep: Any = "x" * 100_000
    for _ in range(100):
        deep = [deep] * 50
    with pytest.raises(ProtocolError) as refused:
        from_frame(session_frames.Close, Frame("close", {"session": deep}))
    assert len(str(refused.value)) < 300


def test_a_manifest_of_nothing_but_lists_is_not_read() -> None:
    lists: list[Any] = [[]] * (17 * MAX_TENSORS)
    with pytest.raises(StoreCorruptError, match="more than 1,600,000 values"):
        Manifest.from_json(json.dumps({"total_bytes": 0, "tensors": lists}))
    frame = to_frame("ok", weight_frames.Missing(digests=()), call=1)
    lists_of_lists = b"[" + b"[]," * 2000 + b"[]]"
    with pytest.raises(ProtocolError, match="lists and objects"):
        from_frame(weight_frames.Missing, Frame("ok", frame.header, lists_of_lists))


def test_the_limits_leave_room_for_the_largest_models() -> None:
    """Of 400 layers with 64 tensors each, or of 700 GB in pieces."""
    digest = "0" * 64
    names = (
        f"layers.{layer}.some_projection_{n}.scales" for layer in range(400) for n in range(64)
    )
    layers = [[name, "float32", [16384, 128], 10**12, [digest]] for name in names]
    digests = [["head.codes", "uint8", [7 * 10**11], 0, [digest] * (7 * 10**11 // (4 << 20))]]
    for tensors, factor in ((layers, 4), (digests, 1)):
        text = json.dumps({"total_bytes": 10**12, "tensors": tensors}, separators=(",", ":"))
        assert factor * len(text) < limits_of("offer").payload_bytes
