"""A process that waits for another one's lock says so."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from edge.weights import writer_lock
from edge.weights.writer_lock import only_writer


@pytest.mark.parametrize(("tries", "lines"), [(19, 0), (20, 1), (60, 1)])
def test_a_long_wait_is_told_once(
    tries: int,
    lines: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(writer_lock, "_LOCK_RETRY_S", 0)
    waited = []

    def gives_up() -> None:
        waited.append(1)
        if len(waited) == tries:
            raise KeyboardInterrupt

    with (
        caplog.at_level(logging.WARNING),
        only_writer(tmp_path, lambda: None),
        pytest.raises(KeyboardInterrupt),
        only_writer(tmp_path, gives_up),
    ):
        pass
    told = [f"waiting for another process that writes into {tmp_path}"]
    assert caplog.messages == told * lines
