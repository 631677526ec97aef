"""The view of `edge top`, from two successive states of a server's cluster. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from edge.cli.records import Columns, make_table
from edge.host.free_memory import format_size
from edge.planning.rate_words import rate_in_words
from edge.protocol.fields import one_line

Json = Mapping[str, Any]

PARTS = (
    ("compute", ("compute_s",)),
    ("disk", ("load_s",)),
    ("sums", ("reduce_s",)),
    ("wait", ("receive_s",)),
    ("send", ("send_s",)),
    ("choose", ("sample_s",)),
)
"""The parts of a step's time: name and counters."""

_LEAST_SHARE = 0.01
_MOST_ROWS = 16
"""Most rows of answers, and most rows of events."""


def tokens_per_s(before: Json | None, now: Json) -> float | None:
    """The rate between two states; None: they are not of the same load."""
    if before is None or before["loads"] != now["loads"] or now["at_s"] <= before["at_s"]:
        return None
    return float((now["new_tokens"] - before["new_tokens"]) / (now["at_s"] - before["at_s"]))


def line(before: Json | None, now: Json) -> str:
    """The state in one line, for output that is not a terminal."""
    return f"{state(now)}: {_rate(tokens_per_s(before, now))} tok/s, {_count(now['answers'])}"


def state(view: Json) -> str:
    model = view["model"]
    if model["is_over"]:
        return "has ended"
    if model["is_recovering"]:
        return "failing over after the loss of a device"
    return "answering" if view["replies"] else "ready"


def screen(before: Json | None, now: Json) -> Group:
    """The screen of a terminal. before: an earlier state, if there is one."""
    model = now["model"]
    title = (
        f"{_text(model['name'])} ({_text(model['dtype'])}), context {model['context_tokens']} "
        f"tokens, {state(now)}"
    )
    figures = (
        f"{_rate(tokens_per_s(before, now))} tokens per second now; "
        f"{_rate(now['measured']['tokens_per_s'])} measured, the last answer; "
        f"{_predicted(now['predicted'])} predicted, one alone; "
        f"{_count(now['answers'])}"
    )
    parts: list[RenderableType] = [Text(title, style="bold"), Text(figures)]
    if now["guesses"]["steps"]:
        parts.append(Text(_guesses(now["guesses"])))
    parts.append(_devices(before, now))
    if copies := now.get("copies"):
        parts.append(Text(_copies(copies)))
    if now["replies"]:
        parts.append(make_table(now["replies"][:_MOST_ROWS], _ANSWERS, right=_ANSWERS))
    if now["spares"]:
        spares = (
            f"{_text(each['name'])} ({_text(each['health'])}{_free(each['free_bytes'])})"
            for each in now["spares"]
        )
        parts.append(Text(f"Not needed now: {', '.join(spares)}"))
    parts += map(Text, _events(now)[-_MOST_ROWS:])
    return Group(*parts)


def _copies(copies: Sequence[Json]) -> str:
    """Where answers are, copy by copy."""
    said = (
        f"{' and '.join(map(_text, each['devices']))} {each['answers']} of {each['answered']}"
        for each in copies
    )
    return f"Copies, with answers under way of all so far: {'; '.join(said)}"


def _guesses(guesses: Json) -> str:
    drafted, right = int(guesses["drafted_tokens"]), int(guesses["accepted_tokens"])
    per_pass = 1 + right / guesses["steps"]
    return (
        f"{right:,} of {drafted:,} guessed tokens were right: {per_pass:.1f} tokens for each pass "
        "with guesses"
    )


def _events(view: Json) -> list[str]:
    """Losses and returns of devices, in order."""
    told: list[str] = []
    recoveries = view["recoveries"]
    for number in range(len(recoveries) + 1):
        told += (
            f"{_text(each['name'])} answers again, after {each['away_s']:.0f} s"
            for each in view["returns"]
            if each["recoveries"] == number
        )
        told += (
            f"{_text(each['reason'])}; {_count(each['answers'])} after {each['pause_s']:.1f} s"
            for each in recoveries[number : number + 1]
        )
    return told


def _devices(before: Json | None, now: Json) -> Table:
    is_same = before is not None and before["loads"] == now["loads"]
    earlier = before["devices"] if before is not None and is_same else [None] * len(now["devices"])
    return make_table(
        zip(earlier, now["devices"], strict=True), _DEVICES, right=("weights", "left")
    )


def _layers(device: Json) -> str:
    first, past = device["layers"]
    layers = f"{first}-{past - 1}"
    if pinned := device["host_layers"]:
        layers += f", {pinned} from its host"
    if read := device["streamed_layers"] - pinned:
        layers += f", {read} from disk"
    return layers


def _kv_in_words(device: Json) -> str:
    """The KV cache: its memory, and its parts in host memory and on disk."""
    told = format_size(device["kv_bytes"])
    tiers = device["tiers"] or {"kv_host_bytes": 0, "kv_disk_bytes": 0}
    for name, place in (("kv_host_bytes", "with its host"), ("kv_disk_bytes", "on disk")):
        if tiers[name]:
            told += f", {format_size(tiers[name])} {place}"
    return told


def step_in_words(before: Json | None, now: Json | None) -> str:
    """The parts of a decode step's time since the previous state, or since the load."""
    if now is None:
        return "–"
    since = {name: now[name] - (before[name] if before is not None else 0) for name in now}
    if since["steps"] <= 0:
        return "–"
    seconds = {word: sum(since[name] for name in names) for word, names in PARTS}
    whole_s = sum(seconds.values())
    if whole_s <= 0:
        return "–"
    shares = (
        f"{word} {each / whole_s:.0%}"
        for word, each in sorted(seconds.items(), key=lambda item: -item[1])
        if each >= _LEAST_SHARE * whole_s
    )
    return f"{1e3 * whole_s / since['steps']:.1f} ms: {', '.join(shares)}"


_DEVICES: Columns[tuple[Json | None, Json]] = {
    "device": lambda row: _text(row[1]["name"]),
    "stage": lambda row: str(row[1]["stage"]),
    "layers": lambda row: _layers(row[1]),
    "health": lambda row: _text(row[1]["health"]),
    "weights": lambda row: format_size(row[1]["weight_bytes"]),
    "KV": lambda row: _kv_in_words(row[1]),
    "left": lambda row: format_size(max(0, row[1]["left_bytes"])),
    "a step": lambda row: step_in_words(row[0] and row[0]["decode"], row[1]["decode"]),
}
"""One device: its previous state, and its present one."""

_ANSWERS: Columns[Json] = {
    "answer since": lambda each: f"{each['age_s']:.1f} s",
    "prompt": lambda each: str(each["prompt_tokens"]),
    "tokens so far": lambda each: str(each["new_tokens"]),
}


def _count(answers: int) -> str:
    return f"{answers} answer{'' if answers == 1 else 's'}"


def _free(num_bytes: int | None) -> str:
    return "" if num_bytes is None else f", {format_size(num_bytes)}"


def _rate(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def _predicted(value: Json | None) -> str:
    """A predicted rate with its spread, which older servers do not send."""
    if value is None:
        return "–"
    rate = value["tokens_per_s"]
    return rate_in_words(rate, value.get("tokens_per_s_range", (rate, rate)))


def _text(value: object) -> str:
    return one_line(str(value))
