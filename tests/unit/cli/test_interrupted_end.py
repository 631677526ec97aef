"""Ctrl-C in the moment in which a command ends: it ends quietly, as after any other Ctrl-C."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Any

import click
import pytest

from edge.cli import main as cli
from edge.errors import EdgeError

AT_EXIT = """
import atexit, os, signal, sys
from edge.cli.main import main
atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))
sys.argv = ["edge", "--version"]
main()
"""


def test_while_its_error_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(**_: Any) -> None:
        raise EdgeError("it failed")

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.cli, "main", fails)
    monkeypatch.setattr(click, "echo", interrupted)
    with pytest.raises(SystemExit) as ended:
        cli.main(["peers"])
    assert ended.value.code == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signal for one process")
def test_while_python_ends() -> None:
    found = subprocess.run(
        [sys.executable, "-c", AT_EXIT], capture_output=True, text=True, check=False, timeout=100
    )
    assert found.returncode == -signal.SIGINT  # 130 in a shell
    assert found.stdout.startswith("edge")
    assert found.stderr == ""
