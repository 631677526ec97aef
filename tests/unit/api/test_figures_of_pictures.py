"""The figures of a reply whose prompt has pictures."""

from __future__ import annotations

import queue
from types import SimpleNamespace
from typing import Any, cast

from edge.answers.answer import AnswerPictures
from edge.answers.terms import Terms
from edge.api.model import Model
from edge.api.reply import AskedReply, Reply, ReplyFeed, ReplyMaker
from edge.cli.reply_view import figures_of
from edge.planning.forecast import Forecast
from tests.unit.planning.test_streaming_sentence import proposal

PROPOSAL = proposal(1 << 20)


def reply(predicted_s: float | None) -> Reply:
    running: Any = SimpleNamespace(recoveries=())
    maker = ReplyMaker(running=running, tokenizer=None, forecast=Forecast(PROPOSAL))
    asked = AskedReply(
        terms=Terms(prompt=(1, 2, 3), max_new_tokens=1), match=None, keep=lambda: None
    )
    feed = ReplyFeed(maker, asked, queue.SimpleQueue())
    feed._answer.pictures = AnswerPictures(
        rows={}, places=None, tiles_read=2, seconds=1.5, predicted_s=predicted_s
    )
    feed.token(7, "length", 0.0, None)
    return feed.reply()


def test_the_first_token_waits_for_pictures() -> None:
    found = reply(predicted_s=0.25)
    figures = found.statistics
    assert (figures["tiles_read"], figures["pictures_s"]) == (2, 1.5)
    assert figures["predicted_pictures_s"] == 0.25
    alone = Forecast(PROPOSAL).of(prompt_tokens=3, new_tokens=1)
    assert alone is not None
    assert figures["predicted_first_token_s"] == alone.first_token_s + 0.25
    told = figures_of(cast(Model, SimpleNamespace(proposal=PROPOSAL)), found)
    assert "of which images took 1.50 s (predicted 0.25)" in told


def test_what_is_not_known_is_not_predicted() -> None:
    found = reply(predicted_s=None)
    assert found.statistics["predicted_pictures_s"] is None
    assert "predicted_first_token_s" not in found.statistics
    assert "predicted_tokens_per_s" in found.statistics
    told = figures_of(cast(Model, SimpleNamespace(proposal=PROPOSAL)), found)
    assert "images took 1.50 s, on" in told
