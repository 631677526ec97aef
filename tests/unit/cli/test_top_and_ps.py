"""What `edge top` makes of two looks at a server, and how `edge ps` puts shards together."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
from rich.console import Console

from edge.cli.commands.ps import loaded_models
from edge.cli.commands.top import _look
from edge.cli.top_view import line, screen, step_in_words, tokens_per_s
from edge.protocol.description import HostedModel
from tests.support.answering import answering, dead_proxy
from tests.support.peer_infos import peer_info

DECODE = {
    "steps": 10,
    "compute_s": 0.06,
    "load_s": 0.0,
    "reduce_s": 0.03,
    "receive_s": 0.0099,
    "send_s": 0.0,
    "sample_s": 0.0001,
}
VIEW: dict[str, Any] = {
    "at_s": 100.0,
    "loads": 0,
    "model": {
        "name": "llama\x1b[2J",
        "dtype": "int4",
        "context_tokens": 512,
        "can_chat": True,
        "is_over": False,
        "is_recovering": False,
    },
    "devices": [
        {
            "name": "attic",
            "stage": 0,
            "layers": [0, 12],
            "has": "heads 0-8",
            "streamed_layers": 3,
            "host_layers": 1,
            "weight_bytes": 1 << 20,
            "kv_bytes": 2 << 20,
            "left_bytes": -1,
            "health": "alive",
            "decode": DECODE,
            "tiers": {"kv_host_bytes": 0, "kv_disk_bytes": 5 << 20},
        }
    ],
    "links": [],
    "spares": [
        {"name": "desk", "health": "alive", "free_bytes": 1 << 30},
        {"name": "shed", "health": "no answer", "free_bytes": None},
    ],
    "predicted": None,
    "measured": {"tokens_per_s": 41.25},
    "guesses": {"drafted_tokens": 0, "accepted_tokens": 0, "steps": 0},
    "answers": 2,
    "replies": [{"age_s": 1.5, "prompt_tokens": 7, "new_tokens": 40}],
    "recoveries": [{"reason": "peer hall: it left", "pause_s": 0.7, "answers": 1}],
    "returns": [
        {"name": "hall", "away_s": 12.3, "recoveries": 1},
        {"name": "desk", "away_s": 4.0, "recoveries": 0},
    ],
    "new_tokens": 300,
}


def later(**changes: object) -> dict[str, Any]:
    view = copy.deepcopy(VIEW)
    view["devices"][0]["decode"] |= {"steps": 30, "compute_s": 0.26, "reduce_s": 0.03}
    return view | {"at_s": 102.0, "new_tokens": 400, **changes}


def shown(before: dict[str, Any] | None, now: dict[str, Any]) -> str:
    out = io.StringIO()
    Console(file=out, width=200).print(screen(before, now))
    return out.getvalue()


def test_a_rate_is_of_two_looks_at_the_same_load() -> None:
    assert tokens_per_s(VIEW, later()) == 50.0
    assert tokens_per_s(None, VIEW) is None
    assert tokens_per_s(VIEW, later(loads=1)) is None
    assert tokens_per_s(VIEW, VIEW) is None
    assert line(VIEW, later(replies=[])) == "ready: 50.0 tok/s, 2 answers"
    assert line(None, later()) == "answering: – tok/s, 2 answers"


def test_where_the_time_of_a_step_goes() -> None:
    assert step_in_words(None, DECODE) == "10.0 ms: compute 60%, sums 30%, wait 10%"
    since = later()["devices"][0]["decode"]
    assert step_in_words(DECODE, since) == "10.0 ms: compute 100%"
    assert step_in_words(DECODE, DECODE) == "–"
    assert step_in_words(None, None) == "–"


def test_a_screen_has_it_all_and_no_codes_of_a_terminal() -> None:
    assert "guessed" not in shown(VIEW, later())
    guesses = {"drafted_tokens": 1200, "accepted_tokens": 800, "steps": 200}
    text = shown(VIEW, later(guesses=guesses))
    for each in (
        "800 of 1,200 guessed tokens were right: 5.0 tokens for each pass with guesses",
        *("llama", "answering", "50.0 tokens per second now", "41.2 measured", "– predicted"),
        *("attic", "0-11, 1 from its host, 2 from disk", "1.0 MiB", "10.0 ms: compute 100%"),
        *("2.0 MiB, 5.0 MiB on disk", "1.5 s", "40"),
        "Not needed now: desk (alive, 1.0 GiB), shed (no answer)",
        "desk answers again, after 4 s\npeer hall: it left; 1 answer after 0.7 s\nhall answers",
    ):
        assert each in text, each
    assert "\x1b" not in text
    assert "0 B" in text, "there is not less than nothing left"


@pytest.mark.parametrize(
    ("more", "said"),
    [({"tokens_per_s_range": [57.2, 62.4]}, "57–62 predicted"), ({}, "59.6 predicted")],
    ids=["with a spread", "by a server of before"],
)
def test_a_predicted_rate_is_shown_with_its_spread(more: dict[str, Any], said: str) -> None:
    predicted = {"tokens_per_s": 59.61, "first_token_s": 0.1, **more}
    assert said in shown(VIEW, later(predicted=predicted))


@pytest.mark.parametrize(
    ("state", "words"),
    [("is_over", "has ended"), ("is_recovering", "failing over after the loss of a device")],
)
def test_the_end_and_a_loss_are_told(state: str, words: str) -> None:
    view = later()
    view["model"][state] = True
    assert words in shown(None, view)


def shard(name: str, stage: int, rank: int, user: str = "me", streamed: int = 0) -> HostedModel:
    return HostedModel(
        name=name,
        dtype="int4",
        stage=stage,
        rank=rank,
        sums="links",
        bytes=30,
        buffer_bytes=1,
        streamed_bytes=streamed,
        host_bytes=0,
        kv_bytes=10,
        kv_host_bytes=0,
        kv_disk_bytes=0,
        user=user,
    )


def test_shards_of_a_model_come_together() -> None:
    attic = peer_info("attic", models=(shard("m", 1, 0), shard("other", 0, 0)))
    desk = peer_info("desk", models=(shard("m", 0, 0), shard("m", 0, 0, user="somebody")))
    found = loaded_models([attic, desk])
    assert [(each["name"], each["user"]) for each in found] == [
        ("m", "me"),
        ("m", "somebody"),
        ("other", "me"),
    ]
    assert [shard["peer"] for shard in found[0]["shards"]] == ["desk", "attic"]
    (first, _second) = found[0]["shards"]
    assert (first["peer"], first["weight_bytes"], first["kv_bytes"]) == ("desk", 20, 10)


def test_a_server_of_this_machine_is_asked_without_a_proxy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    with dead_proxy(monkeypatch), answering(b'{"at_s": 1}', asked) as url:
        assert _look(f"{url}/api/cluster", None) == {"at_s": 1}
    assert asked == ["/api/cluster"]
