"""`edge peer` on a device with a share of a core: each run of a graph takes as much longer.

A run that takes t of its thread's processor time ends after t / share: the thread waits for the
rest. So the device is slow whenever it computes, like a slower core, and several fit on one core
as long as their shares do. Its sums, its sampling and its loading are as fast as the machine.

And it keeps its speed, though the machine below does not: t is not what this very run took, but
what the fastest fifth took of all trials of the same graph with the same shapes, by this daemon and
those before it (a file for each graph remembers). A machine that is shared with others, or
emulated itself, changes its speed by tens of percent from one moment to the next, and a graph that
begins after a neighbour's on the same core takes longer than one that has the core for itself, as
a device has. As long as a run takes less than t / share, nothing of that is seen.

A trial is a step whose results do not count, before the first one of its shapes that does: graph
after graph, without sums, when nobody else computes. So is all measuring. (Where the machine was
slow for all trials, it is the fastest fifth of the runs that count.)

And its memory is its own, though the machine has one, and it says so: the devices take turns, so no
graph reads weights while another does. Who has to wait for its turn has the time, if their shares
are less than one core in all: it would have waited afterwards. That holds for slices by speed; so
devices measure themselves one after the other, where all do the same.

Linux's own shares are not like that. A quota of a control group is given out per period, and a
device that waits for its neighbours saves it up: with half of a core it then computes as fast as
with all of it. And it is taken away at the tick only, every 4 ms where HZ is 250: with 1 ms of
every 4 a group ran for 4 and paused for 12, far longer than what lies between two sums.

None of them may hold its core while it waits for its neighbours, as others are on it, or on the
other half of it: so they sleep at once. Where devices are more than cores, they share all of them,
and whoever is woken, by a message or at the end of a run, must not wait until another has computed,
as it would for up to 3 ms: so there everything but the runs of graphs has real-time priority. Links
are measured that way, too.

python -m demos.bench.clusters.slow_peer SHARE own|shared TURNS OPTIONS-OF-EDGE-PEER
"""

from __future__ import annotations

import bisect
import ctypes
import fcntl
import hashlib
import json
import os
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

import edge.backends.ort.backend
import edge.backends.ort.program
import edge.host.identity
import edge.peer.profiling_calls
import edge.profiling.profile
import transport.tcp_link
from edge.cli.main import main
from edge.host.atomic_files import write_whole
from edge.host.cache_paths import cache_root
from transport import SoloCollective

MOST_BEHIND_S = 0.0005
"""What a run took too long, because a neighbour had the core, the next ones make good; but no more
than this, so that nobody catches up by bursts."""

AWAKE_S = 0.0001
"""The end of a wait is spent looking at the clock: who sleeps wakes up to 60 µs too late."""

_PR_SET_TIMERSLACK = 29


MOST_RUNS = 4096
"""Of one graph, of which times are kept: enough to be sure."""

MOST_REMEMBERED = 1024
"""Of those, evenly picked, for daemons to come."""

FEWEST_RUNS = 8
"""After so many, and whenever there are twice as many, they are written down."""


TRIALS = 24
"""Of a step of few tokens; before each, other bytes fill the caches."""

FEWER_TRIALS = 8
"""Of longer ones."""

FEW_TOKENS = 4

CACHE_BYTES = 48 << 20


class Usual:
    """What runs usually take: by graph and shapes, the fastest fifth of all trials there were.

    Not the fastest, which may have found its weights in a cache by luck. `folder` remembers the
    trials of daemons before. Where the machine was slow for all of the trials, runs that count are
    faster: then it is their fastest fifth.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._runs: dict[Hashable, list[float]] = {}
        self._counts: Counter[Hashable] = Counter()
        self._seen: dict[Hashable, list[float]] = {}

    def add(self, which: Hashable, seconds: float) -> None:
        """One more trial has taken `seconds`."""
        runs = self._known(which)
        if len(runs) < MOST_RUNS:
            bisect.insort(runs, seconds)
            self._counts[which] = count = self._counts[which] + 1
            if count >= FEWEST_RUNS and not count & (count - 1):
                step = -(-len(runs) // MOST_REMEMBERED)
                write_whole(self._file(which), json.dumps(runs[step // 2 :: step]))

    def s(self, which: Hashable, seconds: float) -> float:
        """Of these runs, when one that counts has taken `seconds`."""
        seen = self._seen.setdefault(which, [])
        if len(seen) < MOST_RUNS:
            bisect.insort(seen, seconds)
        trials = self._known(which)
        usual = [runs[len(runs) // 5] for runs in (trials, seen) if len(runs) >= FEWEST_RUNS]
        return min(usual, default=(trials or seen)[0])

    def _known(self, which: Hashable) -> list[float]:
        runs = self._runs.get(which)
        if runs is None:
            runs = self._runs[which] = self._remembered(which)
        return runs

    def _remembered(self, which: Hashable) -> list[float]:
        try:
            found: list[float] = json.loads(self._file(which).read_text(encoding="ascii"))
        except FileNotFoundError:
            return []
        return found

    def _file(self, which: Hashable) -> Path:
        return self._folder / hashlib.sha256(repr(which).encode()).hexdigest()


def due_s(start_s: float, processor_s: float, share: float, behind_s: float) -> float:
    """When a run is to end that began at `start_s` and usually takes `processor_s` of its thread.

    `behind_s` is by how much the run before ended too late.
    """
    return start_s + processor_s / share - min(behind_s, MOST_BEHIND_S)


def stay_off_the_core() -> None:
    """Never wait by looking again and again: other devices need the core, or its other half."""
    transport.tcp_link.POLL_S = 0.0


class Mode(threading.local):
    """What the runs of this thread are."""

    is_measuring = False
    is_trial = False


def measure_in_turn(turns: Path, mode: Mode) -> None:
    """Measure the device when no other measures itself: their turns are not made for that."""
    measure: Any = edge.profiling.profile.profile

    def alone(*arguments: Any, **options: Any) -> Any:
        with turns.open("ab", buffering=0) as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)
            mode.is_measuring = True
            try:
                return measure(*arguments, **options)
            finally:
                mode.is_measuring = False

    setattr(edge.peer.profiling_calls, "profile", alone)  # noqa: B010 - not ours to type


class NoSums(SoloCollective):
    """For trials: everybody's own part is all there is."""

    def all_reduce(self, array: Any) -> None:
        """Nothing to add."""


def try_first(turn: Any, mode: Mode, *, has_own_core: bool) -> None:
    """Have every program try a step of shapes that are new to it, in a turn of its own."""
    program_class: Any = edge.backends.ort.program.OrtProgram
    run: Callable[..., None] = program_class._run
    tried: WeakKeyDictionary[Any, set[Hashable]] = WeakKeyDictionary()
    other = np.ones(CACHE_BYTES // 8, np.uint64)

    def trial(program: Any, shapes: Any) -> None:
        tokens = max(shape.batch * shape.tokens for shape in shapes)
        buffers = (*program._hidden, *program._partial)
        kept = [buffer.copy() for buffer in buffers]
        fcntl.flock(turn, fcntl.LOCK_EX)
        mode.is_trial = True
        if not has_own_core:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        try:
            for _ in range(TRIALS if tokens <= FEW_TOKENS else FEWER_TRIALS):
                np.bitwise_or.reduce(other)
                run(program, shapes, NoSums())
        finally:
            if not has_own_core:
                os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
            mode.is_trial = False
            fcntl.flock(turn, fcntl.LOCK_UN)
        for buffer, before in zip(buffers, kept, strict=True):
            buffer[...] = before

    def run_after_trial(program: Any, shapes: Any, collective: Any) -> None:
        graphs = id(program._graphs)  # others, where layers stream from now on
        key = (graphs, *((shape.batch, shape.tokens, shape.rows) for shape in shapes))
        known = tried.setdefault(program, set())
        if not mode.is_measuring and key not in known:
            known.add(key)
            trial(program, shapes)
        run(program, shapes, collective)

    program_class._run = run_after_trial


def slow_down(share: float, *, has_own_core: bool, turns: Path) -> None:
    """Have every session that is made from now on take its time, and its turn: a lock of a file."""
    # A machine of its own, also for who asks which devices share a memory.
    edge.host.identity._BOOT_ID = turns.with_name(f"boot-{os.getpid()}")
    edge.host.identity._BOOT_ID.write_text(uuid.uuid4().hex)
    mode = Mode()
    measure_in_turn(turns.with_name("measuring"), mode)
    turn = turns.open("ab", buffering=0)
    try_first(turn, mode, has_own_core=has_own_core)
    awake_s = AWAKE_S if has_own_core else 0.0
    import onnxruntime as ort  # after Edge's back end, which sets how it is to begin

    fast: Any = ort.InferenceSession
    late = threading.local()
    folder = cache_root() / "usual"
    folder.mkdir(parents=True, exist_ok=True)
    usual = Usual(folder)

    class ShapedBinding(ort.IOBinding):  # type: ignore[misc]
        """Knows the shapes of its inputs, which tell a prompt's run from a token's."""

        def __init__(self, session: Any) -> None:
            super().__init__(session)
            self.shapes: list[tuple[int, ...]] = []

        def bind_input(
            self, name: Any, kind: Any, device: Any, dtype: Any, shape: Any, at: Any
        ) -> None:
            super().bind_input(name, kind, device, dtype, shape, at)
            self.shapes.append(tuple(shape))

    class SlowSession(fast):  # type: ignore[misc]
        def __init__(self, model: Any, *arguments: Any, **options: Any) -> None:
            super().__init__(model, *arguments, **options)
            key = hashlib.sha256(model).digest() if isinstance(model, bytes) else model
            self._graph = (ort.__version__, key)

        def io_binding(self) -> Any:
            return ShapedBinding(self)

        def run_with_iobinding(self, iobinding: Any, run_options: Any = None) -> None:
            if mode.is_trial:
                processor_s = time.thread_time()
                super().run_with_iobinding(iobinding, run_options)
                usual.add((*self._graph, *iobinding.shapes), time.thread_time() - processor_s)
                return
            start_s = time.perf_counter()
            # Asleep: on many machines two cores are halves of one, and who polls takes its share.
            fcntl.flock(turn, fcntl.LOCK_EX)
            try:
                if not has_own_core:
                    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
                processor_s = time.thread_time()
                super().run_with_iobinding(iobinding, run_options)
                processor_s = time.thread_time() - processor_s
            finally:
                fcntl.flock(turn, fcntl.LOCK_UN)
            which = (*self._graph, *iobinding.shapes)
            if mode.is_measuring:
                usual.add(which, processor_s)
            took_s = usual.s(which, processor_s)
            if not has_own_core:
                os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
            end_s = due_s(start_s, took_s, share, getattr(late, "behind_s", 0.0))
            if (pause_s := end_s - time.perf_counter() - awake_s) > 0:
                time.sleep(pause_s)
            while time.perf_counter() < end_s:
                pass
            late.behind_s = time.perf_counter() - end_s

    ort.InferenceSession = SlowSession
    # Threads inherit it: sleeps end when they should, not up to 50 µs later.
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)


if __name__ == "__main__":
    core_share, has_own_core = float(sys.argv[1]), sys.argv[2] == "own"
    if core_share < 1:
        stay_off_the_core()
        slow_down(core_share, has_own_core=has_own_core, turns=Path(sys.argv[3]))
    main(["peer", *sys.argv[4:]])
