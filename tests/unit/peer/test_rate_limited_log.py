"""Failures of others' making: a line each, and few of them."""

from __future__ import annotations

import logging

import pytest

from edge.peer.rate_limited_log import BURST, EVERY_S, RateLimitedLog


def failure() -> ValueError:
    try:
        raise ValueError("two\nlines " + "x" * 5000)
    except ValueError as error:
        return error


def test_lines_are_short_and_few(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    log = RateLimitedLog(logging.getLogger("rare"), clock=lambda: now_s)
    for _ in range(1000):
        log.failed("this", failure())
    assert len(caplog.records) == BURST
    assert all(record.exc_info is None for record in caplog.records)
    line = caplog.records[0].getMessage()
    assert line.startswith("this failed: ValueError: two lines xxx")
    assert __file__ in line
    assert "\n" not in line
    assert len(line) < 600
    now_s = EVERY_S
    log.failed("this", failure())
    assert len(caplog.records) == BURST + 1
    assert caplog.messages[-1].endswith(f"{1000 - BURST} more were not told")
