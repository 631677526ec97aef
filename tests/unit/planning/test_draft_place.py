"""On which device a draft model runs, and which ones are refused."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from edge.demos.bundled import MODEL
from edge.errors import CapacityError, RequestError
from edge.host.cache_paths import CACHE_VARIABLE
from edge.planning import draft_place
from edge.planning.draft_place import DraftPlace, check_draft, place_draft
from edge.planning.load_options import LoadOptions
from edge.planning.measured_proposal import measured_proposal
from edge.planning.proposal import Proposal
from edge.progress import ignore_progress
from edge.protocol.peer_info import PeerInfo
from edge.weights.checkpoint import Checkpoint
from tests.support.peer_infos import peer_info
from tests.support.plans import bundled_plan

ROOM = 1 << 30
OPTIONS = LoadOptions(dtype="int8", plan=bundled_plan("solo", devices=["runs"]))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))


def placed(peers: Sequence[PeerInfo], options: LoadOptions = OPTIONS) -> DraftPlace:
    async def main() -> DraftPlace:
        with Checkpoint.open(MODEL) as model:
            proposal = await measured_proposal(
                model, peers, options, measure="nothing", on_progress=ignore_progress
            )
            return await place_draft(model, proposal, peers, options, measure="nothing")

    return asyncio.run(main())


def rates(monkeypatch: pytest.MonkeyPatch, seconds: dict[str, float]) -> None:
    """Predicted times of a token of a plan, by its device."""

    def token_s(proposal: Proposal) -> float | None:
        return seconds.get(proposal.plan.devices[0])

    monkeypatch.setattr(draft_place, "_token_s", token_s)


def test_the_fastest_device_that_the_plan_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    rates(monkeypatch, {"runs": 0.02, "slow": 0.01, "fast": 0.002})
    peers = [peer_info(name, free_bytes=ROOM) for name in ("runs", "slow", "fast")]
    found = placed(peers)
    assert (found.peer.name, found.is_apart, found.is_slow) == ("fast", True, False)
    assert found.sentence == (
        "model drafts on fast, which has no part in the plan, 2 ms for each guess"
    )
    full = peer_info("fast", free_bytes=1 << 20, model_free_bytes=1 << 20)
    assert placed([*peers[:2], full]).peer.name == "slow"
    leaving = peer_info("fast", free_bytes=ROOM, is_leaving=True)
    assert placed([*peers[:2], leaving]).peer.name == "slow"


def test_the_sampler_drafts_itself_where_no_device_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rates(monkeypatch, {"runs": 0.02})
    found = placed([peer_info("runs", free_bytes=ROOM)])
    assert (found.peer.name, found.is_apart, found.is_slow) == ("runs", False, True)
    assert found.sentence.endswith("; that gains nothing, as a token takes 20 ms")
    two = LoadOptions(dtype="int8", plan=bundled_plan("pipeline_2", devices=["first", "runs"]))
    found = placed([peer_info(name, free_bytes=ROOM) for name in ("first", "runs")], two)
    assert (found.peer.name, found.is_apart) == ("runs", False), "the last stage samples"


def test_what_the_plan_takes_is_not_taken_twice() -> None:
    """With a shorter context there may be room yet."""

    def on_one(free_bytes: int) -> DraftPlace:
        return placed([peer_info("runs", free_bytes=free_bytes, model_free_bytes=free_bytes)])

    whole = on_one(ROOM)
    taken = ROOM - whole.peer.free_bytes
    assert taken > 1 << 20
    assert whole.options.context_tokens == 512
    with pytest.raises(CapacityError, match="no device has room for the draft model model: "):
        on_one(taken + (1 << 20))


def test_devices_may_share_the_memory_that_the_plan_takes() -> None:
    def apart(pool: str) -> int:
        peers = [
            peer_info(name, free_bytes=ROOM, pool_free_bytes=ROOM, memory_pool=each)
            for name, each in (("runs", "one"), ("drafts", pool))
        ]
        found = placed(peers)
        assert found.peer.name == "drafts"
        return found.peer.free_now_bytes

    assert apart("another") == ROOM
    assert apart("one") < ROOM - (1 << 20)


@dataclass
class Described:
    """What of a checkpoint is looked at."""

    spec: Any
    name: str = "other"
    has_tokenizer: bool = False


def test_a_model_without_a_tokenizer_needs_as_many_tokens() -> None:
    with Checkpoint.open(MODEL) as model:
        same: Any = Described(model.spec)
        asyncio.run(check_draft(model, model, LoadOptions()))
        asyncio.run(check_draft(same, model, LoadOptions()))
        more: Any = Described(type("Spec", (), {"vocab_size": model.spec.vocab_size + 1}))
        with pytest.raises(RequestError, match="other has another vocabulary than model"):
            asyncio.run(check_draft(more, model, LoadOptions()))
        with pytest.raises(RequestError, match="model has recurrent states, or int4 ones"):
            asyncio.run(check_draft(model, model, LoadOptions(kv_dtype="int4")))


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"speculate": "draft"}, "needs a draft model"),
        ({"draft": 5}, "draft must be a model's path"),
        ({"draft": "m", "batch_invariant": True}, "guess no tokens"),
        ({"draft": "m", "observes": True}, "guess no tokens"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], what: str) -> None:
    with pytest.raises(RequestError, match=what):
        LoadOptions(**options)


def test_a_draft_model_is_used_unless_another_way_is_named() -> None:
    assert LoadOptions().usually_speculates == "off"
    assert LoadOptions(draft="m").usually_speculates == "draft"
    assert LoadOptions(draft="m", speculate="off").usually_speculates == "off"
    assert LoadOptions(draft="m", speculate="auto").usually_speculates == "auto"
