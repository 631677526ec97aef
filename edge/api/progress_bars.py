"""Progress of long work as bars on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from edge.host.free_memory import format_size
from edge.progress import OnProgress, Phase, Progress, ignore_progress

_LABELS: dict[Phase, str] = {
    "download": "downloading",
    "measure": "measuring once:",  # it is kept for a day
    "quantise": "quantising",
    "hash": "preparing",
    "send": "sending",
    "load": "loading",
    "generate": "answering",
    "evaluate": "reading the text",
    "observe": "observing",
    "allot": "allotting bits",
}


_UNITS: dict[Phase, str] = {
    "measure": "links",
    "quantise": "weights",
    "hash": "tensors",
    "generate": "answers",
    "observe": "tokens",
    "allot": "matrices",
}
"""Units of the phases; all others count bytes."""


def label_of(event: Progress) -> str:
    """The phase and its peer."""
    who = event.peer or ("links" if event.phase == "measure" else "")
    return f"{_LABELS[event.phase]} {who}".strip()


def amount_of(event: Progress, rate: float | None) -> str:
    """Done, total and rate, in the units of the phase."""
    if event.total <= 1:
        return ""
    if event.phase == "evaluate":  # bytes of logits mean nothing to a user
        return f"{100 * event.done // event.total} %"
    unit = _UNITS.get(event.phase)
    if unit is None:
        done, total = format_size(event.done), format_size(event.total)
        return f"{done} of {total}" + (f", {format_size(int(rate))}/s" if rate else "")
    scale, name = _scale(event.total)
    digits = 1 if scale > 1 else 0
    said = f"{event.done / scale:.{digits}f} of {event.total / scale:.{digits}f}{name} {unit}"
    if not rate:
        return said
    scale, name = _scale(rate)
    return f"{said}, {rate / scale:.1f}{name}/s"


def length_of(event: Progress) -> int | None:
    """The length of a bar; None for unfinished work in one piece, whose progress is unknown."""
    return None if event.total == 1 and event.done == 0 else event.total


def _scale(number: float) -> tuple[int, str]:
    return max(((size, word) for size, word in _SCALES if number >= size), default=(1, ""))


_SCALES = ((10**6, " million"), (10**9, " billion"))


@contextmanager
def progress_bars(show: bool | OnProgress | None = None) -> Iterator[OnProgress]:
    """Bars on stderr with done, rate and time left, one for each phase and peer.

    show: None: on a terminal, and in notebooks with ipywidgets; a function is called in place of
    bars. Bars disappear when their work is done.
    """
    if callable(show):
        yield show
        return
    if show is None:
        show = sys.stderr.isatty() or _is_notebook()
    if not show:
        yield ignore_progress
        return
    from rich import progress as bars
    from rich.console import Console

    display = bars.Progress(
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.TextColumn("{task.fields[amount]}"),
        bars.TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    tasks: dict[tuple[str, str], bars.TaskID] = {}

    def on_progress(event: Progress) -> None:
        key = (event.phase, event.peer)
        if key not in tasks:
            tasks[key] = display.add_task(label_of(event), total=length_of(event), amount="")
        task = tasks[key]
        rate = display.tasks[display.task_ids.index(task)].speed
        amount = amount_of(event, rate)
        display.update(task, completed=event.done, total=length_of(event), amount=amount)

    with display:
        yield on_progress


def _is_notebook() -> bool:
    """Whether this is a notebook with ipywidgets."""
    if "IPython" not in sys.modules:
        return False
    from rich.console import Console

    return Console().is_jupyter and find_spec("ipywidgets") is not None
