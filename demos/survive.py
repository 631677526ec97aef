"""A peer is killed in the middle of a sentence: there is a pause, and the text is the same."""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from subprocess import Popen

import edge
from edge.demos.bundled import MODEL, STORY, require
from edge.demos.processes import child, daemon_address

NAMES = ("attic", "kitchen", "cellar")
TOKENS = 60
LOST_AFTER = 20
"""Tokens."""


@contextlib.contextmanager
def peers(names: Sequence[str], folder: Path) -> Iterator[dict[str, tuple[str, Popen[str]]]]:
    """Daemons as anyone would start them, by name: where they listen, and the process."""
    with contextlib.ExitStack() as stack:
        daemons = {}
        for name in names:
            command = [sys.executable, "-m", "edge", "peer", "--json", "--supervised"]
            command += ["--no-announce", "--listen", "127.0.0.1:0", "--threads", "1"]
            daemons[name] = stack.enter_context(
                child([*command, "--name", name], cache=folder / name)
            )
        yield {name: (daemon_address(each, name), each) for name, each in daemons.items()}


def run() -> None:
    """Two of three peers run the model; the third takes the seat of the one that dies."""
    with (
        tempfile.TemporaryDirectory() as folder,
        peers(NAMES, Path(folder)) as daemons,
        edge.Cluster.connect([address for address, _ in daemons.values()]) as cluster,
    ):
        ids = {peer.name: peer.id for peer in cluster.peers}
        with edge.Cluster.connect([daemons[name][0] for name in NAMES[:2]]) as two:
            plan = two.propose(MODEL, plan="pipeline").plan
        model = cluster.load(MODEL, plan=plan)
        undisturbed = model.generate(STORY, max_new_tokens=TOKENS, ignore_eos=True)

        lost = next(name for name in NAMES if ids[name] == plan.devices[-1])
        print(f"\n  {STORY}\n  > ", end="", flush=True)
        stream = model.stream(STORY, max_new_tokens=TOKENS, ignore_eos=True)
        longest_s, last_s = 0.0, time.monotonic()
        for number, token in enumerate(stream, 1):
            now_s = time.monotonic()
            longest_s, last_s = max(longest_s, now_s - last_s if number > 1 else 0.0), now_s
            print(token.text, end="", flush=True)
            if number == LOST_AFTER:
                print(f" [{lost} is killed] ", end="", flush=True)
                daemons[lost][1].kill()
        reply = stream.reply()
        print()

        require(len(reply.recoveries) == 1, "the model should have gone on once")
        require(reply.token_ids == undisturbed.token_ids, "the tokens should be the same")
        names = [model.peers[device].name for device in model.plan.devices]
        print(
            f"\n  {reply.recoveries[0].reason}. It went on on {' and '.join(names)} after "
            f"{longest_s:.2f} s:\n  {TOKENS} tokens, the same as without the loss."
        )
