"""A beginning that was computed before: what another session, plan, daemon or device has of it."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import edge
from edge.demos.bench import case
from edge.demos.bench.case import Found, Given
from edge.demos.bench.results import Figures
from edge.demos.bench.turns import random_prompt
from edge.demos.limited_peer import limited_peer
from edge.partition import Parallel

_KV_DISK = "8GiB"


@dataclass
class _Daemons:
    """Two daemons by name, each with a folder for keys and values."""

    given: Given
    folder: Path
    """For keys and values."""
    addresses: dict[str, str]
    stack: contextlib.ExitStack

    def start(self, names: Sequence[str]) -> None:
        for name in names:
            peer = limited_peer(
                cache=self.given.folder / "cache",
                threads=self.given.threads,
                name=name,
                kv_disk=f"{self.folder / name}:{_KV_DISK}",
            )
            self.addresses[name] = self.stack.enter_context(peer).address

    def restart(self) -> None:
        self.stack.close()
        self.start([*self.addresses])

    @contextlib.contextmanager
    def model(self, names: Sequence[str], plan: Parallel) -> Iterator[edge.Model]:
        addresses = [self.addresses[name] for name in names]
        options = edge.LoadOptions(
            dtype="auto" if self.given.file else self.given.dtype,
            context_tokens=self.given.tokens + 2 * self.given.new_tokens,
        )
        with edge.Cluster.connect(addresses) as cluster:
            proposed = cluster.propose(self.given.path, options, plan=plan, measure="nothing").plan
            with cluster.load(self.given.path, options, plan=proposed, progress=False) as model:
                yield model


@dataclass(frozen=True)
class _Case:
    names: Sequence[str]
    plan: Parallel
    """By which the beginning is computed."""
    then_names: Sequence[str]
    then_plan: Parallel
    """By which it is found."""
    restarts: bool = False


_BOTH = ("first", "second")
_CASES = {
    "another session": _Case(_BOTH, "pipeline", _BOTH, "pipeline"),
    "another plan": _Case(_BOTH, "pipeline", _BOTH, "tensor"),
    "daemons that were restarted": _Case(_BOTH, "pipeline", _BOTH, "pipeline", restarts=True),
    "a device that joined": _Case(_BOTH[:1], "auto", _BOTH, "pipeline"),
}


@case.case(
    "what another session has of a beginning that was computed before",
    case.FILE,
    case.shape("M"),
    case.dtype(),
    case.number("--threads", 1, "Of each of two daemons."),
    case.number("--tokens", 8000, "Of the beginning."),
    case.number("--new-tokens", 64, "Behind it."),
    case.rounds(3),
    case.FOLDER,
)
def beginnings(given: Given) -> Iterator[Found]:
    """The first token behind a long beginning that was computed before, against that of a prompt
    with nothing before it; from the start of a load, and from the request. Also, behind keys and
    values that its own session keeps: then attention to them is all that is new.

    It is found by another session, by another plan, after a restart, and with a device that has
    just joined. Each session is a load of its own.
    """
    figures = Figures()
    given.folder.mkdir(parents=True, exist_ok=True)
    for number, name in itertools.product(range(given.rounds), _CASES):
        with (
            tempfile.TemporaryDirectory(dir=given.folder) as folder,
            contextlib.ExitStack() as stack,
        ):
            daemons = _Daemons(given, Path(folder), {}, stack)
            daemons.start(_BOTH)
            _measure(daemons, name, number, figures)
    variant = f"2 x {given.threads} threads, {given.tokens} + {given.new_tokens} tokens"
    if not given.file:
        variant = f"{given.dtype}, {variant}"
    yield Found(figures=figures, variant=variant, model=given.model)


def _measure(daemons: _Daemons, name: str, number: int, figures: Figures) -> None:
    given, asked = daemons.given, _CASES[name]
    with daemons.model(asked.names, asked.plan) as model:
        beginning = random_prompt(model, given.tokens, 4 * number)
        new, other, again = (
            random_prompt(model, given.new_tokens, 4 * number + i) for i in (1, 2, 3)
        )
        reply = model.generate(beginning, max_new_tokens=1, ignore_eos=True)
        figures.add(f"{name}, computed", "s", reply.statistics["first_token_s"])
        reply = model.generate([*beginning, *again], max_new_tokens=1, ignore_eos=True)
        figures.add(f"{name}, kept by the session", "s", reply.statistics["first_token_s"])
    if asked.restarts:
        daemons.restart()
    sides = {"empty": other, "found": [*beginning, *new]}
    seconds: dict[str, tuple[float, float]] = {}
    for side in list(sides)[:: 1 if number % 2 else -1]:
        begun_s = time.perf_counter()
        with daemons.model(asked.then_names, asked.then_plan) as model:
            reply = model.generate(sides[side], max_new_tokens=1, ignore_eos=True)
            seconds[side] = time.perf_counter() - begun_s, reply.statistics["first_token_s"]
            if side == "found":
                share = reply.statistics["found_tokens"] / given.tokens
                figures.add(f"{name}, found", "share", share)
    for index, since in enumerate(("from the load", "from the request")):
        for side in sides:
            figures.add(f"{name}, {since}, {side}", "s", seconds[side][index])
        ratio = seconds["found"][index] / seconds["empty"][index]
        figures.add(f"{name}, {since}, found / empty", "ratio", ratio)
