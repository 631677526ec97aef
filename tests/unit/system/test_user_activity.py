"""For how long nobody used the device, by what its manager of sessions or its terminals say."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from edge.system.user_activity import unused_s


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs, found first."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


def loginctl(folder: Path, *lines: str, code: int = 0) -> None:
    program = folder / "loginctl"
    told = "".join(f"echo {line}\n" for line in lines)
    program.write_text(f"#!/bin/sh\n{told}exit {code}\n")
    program.chmod(0o700)


def test_sessions_in_use_and_idle(programs: Path) -> None:
    loginctl(programs, "IdleHint=no", "IdleSinceHint=0")
    assert unused_s() == 0.0
    loginctl(programs, "IdleHint=yes", f"IdleSinceHint={int((time.time() - 600) * 1e6)}")
    found = unused_s()
    assert found is not None
    assert 599 < found < 700


def test_terminals_where_there_is_no_manager(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loginctl(programs, code=1)
    one, other = tmp_path / "one", tmp_path / "other"
    for path, age_s in ((one, 50), (other, 900)):
        path.touch()
        os.utime(path, (time.time() - age_s, time.time()))
    users = [SimpleNamespace(terminal=str(path)) for path in (one, other, tmp_path / "gone")]
    monkeypatch.setattr("psutil.users", lambda: users)
    found = unused_s()
    assert found is not None
    assert 49 < found < 150
    monkeypatch.setattr("psutil.users", list)
    assert unused_s() is None
