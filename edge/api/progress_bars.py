"""Progress of long work as bars on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from edge.progress import OnProgress, Phase, Progress, ignore_progress

_LABELS: dict[Phase, str] = {
    "measure": "measuring",
    "quantise": "quantising",
    "hash": "preparing",
    "send": "sending",
    "load": "loading",
    "evaluate": "reading the text",
    "observe": "observing",
    "allot": "allotting bits",
}


@contextmanager
def progress_bars(show: bool | OnProgress | None = None) -> Iterator[OnProgress]:
    """Bars on stderr with bytes, rate and time left, one for each phase and peer.

    None shows them only where stderr is a terminal; a function is called instead. Bars disappear
    when their work is done.
    """
    if callable(show):
        yield show
        return
    if show is None:
        show = sys.stderr.isatty()
    if not show:
        yield ignore_progress
        return
    from rich import progress as bars
    from rich.console import Console

    display = bars.Progress(
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.DownloadColumn(binary_units=True),
        bars.TransferSpeedColumn(),
        bars.TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    tasks: dict[tuple[str, str], bars.TaskID] = {}

    def on_progress(event: Progress) -> None:
        key = (event.phase, event.peer)
        if key not in tasks:
            label = f"{_LABELS[event.phase]} {event.peer}".strip()
            tasks[key] = display.add_task(label, total=event.total)
        display.update(tasks[key], completed=event.done, total=event.total)

    with display:
        yield on_progress
