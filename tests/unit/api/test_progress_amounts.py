"""What a progress bar says of its phase, in units that are true."""

from __future__ import annotations

import io
import sys
import types
from dataclasses import replace
from typing import Any

import pytest

from edge.api.progress_bars import _is_notebook, amount_of, label_of, length_of, progress_bars
from edge.progress import Phase, Progress


@pytest.mark.parametrize(
    ("phase", "done", "total", "rate", "said"),
    [
        ("send", 1 << 20, 1 << 30, None, "1.0 MiB of 1.0 GiB"),
        ("load", 1 << 20, 1 << 30, 1 << 20, "1.0 MiB of 1.0 GiB, 1.0 MiB/s"),
        (
            "quantise",
            250_000_000,
            1_100_000_000,
            15e6,
            "0.2 of 1.1 billion weights, 15.0 million/s",
        ),
        ("quantise", 1_300_000, 4_000_000, 2e6, "1.3 of 4.0 million weights, 2.0 million/s"),
        ("observe", 12, 6_144, 41.3, "12 of 6144 tokens, 41.3/s"),
        ("hash", 19, 183, 20.0, "19 of 183 tensors, 20.0/s"),
        ("allot", 3, 211, None, "3 of 211 matrices"),
        ("measure", 1, 6, None, "1 of 6 links"),
        ("measure", 0, 1, None, ""),
        ("evaluate", 500, 2_000, None, "25 %"),
    ],
)
def test_amounts(phase: Phase, done: int, total: int, rate: float | None, said: str) -> None:
    assert amount_of(Progress(phase=phase, peer="", done=done, total=total), rate) == said


def test_a_bar_has_a_length_where_it_is_known_how_much_is_done() -> None:
    whole = Progress(phase="load", peer="attic", done=0, total=1)
    assert length_of(whole) is None
    assert length_of(replace(whole, done=1)) == 1
    assert length_of(replace(whole, phase="send", total=9)) == 9


def test_what_is_measured_is_said_to_be_so_once() -> None:
    peer = Progress(phase="measure", peer="attic", done=0, total=1)
    assert label_of(peer) == "measuring once: attic"
    assert label_of(replace(peer, peer="")) == "measuring once: links"
    assert label_of(replace(peer, phase="quantise", peer="")) == "quantising"
    assert label_of(replace(peer, phase="send")) == "sending attic"


def test_bars_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import rich.console

    output = io.StringIO()
    usual = rich.console.Console

    def console(**options: Any) -> Any:
        return usual(file=output, force_terminal=True, width=100)

    monkeypatch.setattr(rich.console, "Console", console)
    with progress_bars(True) as on_progress:
        for done in (0, 5, 10):
            on_progress(Progress(phase="observe", peer="", done=done, total=10))
    assert "observing" in output.getvalue()
    assert "10 of 10 tokens" in output.getvalue()


@pytest.mark.parametrize(("has_widgets", "shown"), [(True, True), (False, False)])
def test_notebooks_that_can_draw_them_get_bars(
    monkeypatch: pytest.MonkeyPatch, has_widgets: bool, shown: bool
) -> None:
    """What rich takes for a notebook; it draws by ipywidgets there."""

    class ZMQInteractiveShell:
        pass

    assert not _is_notebook()
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    assert not _is_notebook(), "a terminal with IPython"
    monkeypatch.setattr("builtins.get_ipython", ZMQInteractiveShell, raising=False)
    monkeypatch.setattr(
        "edge.api.progress_bars.find_spec", lambda name: name if has_widgets else None
    )
    assert _is_notebook() is shown
