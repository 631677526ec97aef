"""An answer during which a device becomes busy: left, or waited for."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import edge
from edge.demos.bench import case
from edge.demos.bench.case import Found, Given
from edge.demos.bench.clusters.bed import Bed, open_bed
from edge.demos.bench.clusters.table import GIB, Device
from edge.demos.bench.results import Figures
from edge.demos.bench.turns import in_turn, random_prompt
from edge.planning.load_options import Replan

_QUOTA = 0.5
_PROMPT_TOKENS = 32
_SIDES: dict[str, Replan] = {"moves": "auto", "stays": "off"}


@case.case(
    "an answer while a device is busy",
    case.FILE,
    case.shape(),
    case.dtype(),
    case.number("--devices", 3, "Of half a core each.", least=2),
    case.number("--memory-mib", 512, "Of each."),
    case.number("--new-tokens", 400),
    case.number("--after", 100, "Tokens; then the device with most layers is busy."),
    case.choice("--slower", ["2", "4", "8"], "4"),
    case.number("--seconds", 60, "For so long."),
    case.rounds(3),
    case.FOLDER,
)
def busy_device(given: Given) -> Iterator[Found]:
    """The time to all tokens of an answer, during which a device gets a part of its processor only.

    --slower divides its part of the core. With `--replan auto` and `off`, in turn. Needs root on
    Linux.
    """
    figures, tokens = Figures(), dict[int, tuple[int, ...]]()
    devices = [
        Device(
            name="abcdefgh"[number],
            core=number // 2,
            quota=_QUOTA,
            memory_bytes=given.memory_mib * GIB // 1024,
        )
        for number in range(given.devices)
    ]
    with (
        open_bed(devices, given.folder / "bed") as bed,
        edge.Cluster.connect(bed.addresses) as cluster,
    ):
        cluster.propose(given.path, **_options(given))  # measures

        def side(name: str, number: int) -> float:
            with cluster.load(given.path, **_options(given), replan=_SIDES[name]) as model:
                taken_s, found, moves = _answer(model, bed, devices, given, number)
            assert tokens.setdefault(number, found) == found, "other tokens"
            if number:
                figures.add(f"moves, {name}", "moves", moves)
            return taken_s

        sides = {name: partial(side, name) for name in _SIDES}
        for turn in in_turn(sides, given.rounds):
            for name, taken_s in turn.items():
                figures.add(f"all tokens, {name}", "s", taken_s)
            figures.add("speed, moves / stays", "ratio", turn["stays"] / turn["moves"])
    variant = f"{given.devices} x half a core, {given.memory_mib} MiB, busy x {given.slower}"
    variant += f" after {given.after} of {given.new_tokens} tokens for {given.seconds} s"
    yield Found(figures=figures, variant=variant, model=given.model)


def _options(given: Given) -> dict[str, Any]:
    context = _PROMPT_TOKENS + given.new_tokens
    return {"dtype": "auto" if given.file else given.dtype, "context_tokens": context}


def _answer(
    model: edge.Model, bed: Bed, devices: list[Device], given: Given, number: int
) -> tuple[float, tuple[int, ...], int]:
    """Seconds from the first token on, the tokens, and how often the model moved."""
    rows = model.proposal.rows
    most = max(rows, key=lambda row: row.memory.weight_bytes).name
    group = bed.groups[[each.name for each in devices].index(most)]
    busy_s: float | None = None
    found: list[int] = []
    prompt, begun_s = random_prompt(model, _PROMPT_TOKENS, number), 0.0
    try:
        for token in model.stream(prompt, max_new_tokens=given.new_tokens, ignore_eos=True):
            found.append(token.token_id)
            now_s = time.perf_counter()
            begun_s = begun_s or now_s
            if len(found) == given.after:
                busy_s = now_s
                group.limit_processor(_QUOTA / int(given.slower))
            elif busy_s is not None and now_s - busy_s > given.seconds:
                busy_s = None
                group.limit_processor(_QUOTA)
    finally:
        group.limit_processor(_QUOTA)
    return now_s - begun_s, tuple(found), len(model.recoveries)
