"""What a daemon's log looks like, and how long it is kept."""

from __future__ import annotations

import datetime
import json
import logging
import os
import sys
from pathlib import Path

import click
import pytest

from edge.cli.logs import LinesAsRecords, LogOptions, log_handler
from edge.errors import RequestError


def record(message: str, *arguments: object, level: int = logging.WARNING) -> logging.LogRecord:
    made = logging.LogRecord("edge.peer.audit", level, "x.py", 1, message, arguments, None)
    made.created = 1_700_000_000.25
    return made


def test_a_line_for_people() -> None:
    handler = log_handler(LogOptions())
    assert handler.format(record("%s is here", "attic")) == "edge: attic is here"


def test_a_line_in_a_file_has_its_time(tmp_path: Path) -> None:
    file = tmp_path / "peer.log"
    handler = log_handler(LogOptions(log_file=file))
    handler.emit(record("hello", level=logging.INFO))
    handler.close()
    assert file.read_text() == "2023-11-14T22:13:20.250+00:00 info    hello\n"
    assert file.stat().st_mode & 0o777 == 0o600, "who used this device is nobody else's business"


def test_a_line_for_programs_is_one_line() -> None:
    handler = log_handler(LogOptions(log_format="json"))
    line = handler.format(record('two\nlines of "%s"', "attic"))
    assert json.loads(line) == {
        "at": "2023-11-14T22:13:20.250+00:00",
        "level": "warning",
        "logger": "edge.peer.audit",
        "message": 'two\nlines of "attic"',
    }
    assert "\n" not in line


def test_a_failure_is_told_with_its_traceback() -> None:
    made = record("it failed")
    try:
        raise ValueError("because")
    except ValueError as error:
        made.exc_info = (ValueError, error, error.__traceback__)
    said = json.loads(log_handler(LogOptions(log_format="json")).format(made))
    assert said["exception"].endswith("ValueError: because")


def test_whatever_is_written_is_a_record(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written = LinesAsRecords(sys.stderr)
    handler = log_handler(LogOptions(log_format="json"))
    monkeypatch.setattr(logging.getLogger("edge"), "handlers", [handler])
    monkeypatch.setattr(logging.getLogger("edge"), "propagate", False)
    monkeypatch.setattr(sys, "stderr", written)
    click.echo("edge: it is full; end something", err=True)
    click.echo("\nInterrup", err=True, nl=False)
    print("ted \ud800", file=sys.stderr)
    written.flush()
    said = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [each["message"] for each in said] == ["it is full; end something", "Interrupted \ud800"]
    assert {each["level"] for each in said} == {"warning"}


def test_a_record_that_cannot_be_written_is_not_logged_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written = LinesAsRecords(sys.stderr)
    handler = log_handler(LogOptions(log_format="json"))
    handler.setFormatter(logging.Formatter("%(nothing)s"))
    monkeypatch.setattr(logging.getLogger("edge"), "handlers", [handler])
    monkeypatch.setattr(logging.getLogger("edge"), "propagate", False)
    monkeypatch.setattr(sys, "stderr", written)
    click.echo("hello", err=True)
    assert "Logging error" in capsys.readouterr().err


def test_each_day_has_a_file_and_old_ones_go(tmp_path: Path) -> None:
    file = tmp_path / "peer.log"
    now = datetime.datetime.now(datetime.UTC)
    days = [(now - datetime.timedelta(days=back)).strftime("%Y-%m-%d") for back in range(2, 7)]
    for day in days:
        (tmp_path / f"peer.log.{day}").write_text("old\n")
    (tmp_path / "peer.log.txt").write_text("of somebody else")
    file.write_text("of yesterday\n")
    yesterday_s = now.timestamp() - 24 * 3600
    os.utime(file, (yesterday_s, yesterday_s))
    handler = log_handler(LogOptions(log_file=file, log_days=2))
    made = record("of today")
    handler.handle(made)
    handler.close()
    assert "of today" in file.read_text()
    assert "of yesterday" not in file.read_text()
    yesterday = (now - datetime.timedelta(days=1)).strftime("%Y-%m-%d")
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted(
        ["peer.log", f"peer.log.{yesterday}", f"peer.log.{days[0]}", "peer.log.txt"]
    )


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"--log-file .*: No such file or directory"):
        log_handler(LogOptions(log_file=tmp_path / "none" / "peer.log"))
