"""A peer is killed in the middle of a sentence: there is a pause, and the text is the same."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import edge
from edge.demos.bundled import MODEL, STORY, require
from edge.demos.fleet import Fleet

NAMES = ("attic", "kitchen", "cellar")
LOST_AFTER = 8
TOKENS = 300
"""Tokens of the answer, of which the first story is shown: the rest must not be there before these
are read, even by a busy machine."""


def run() -> None:
    """Two of three peers run the model; the third takes the seat of the one that dies."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Fleet(NAMES, Path(folder)) as fleet,
        edge.Cluster.connect(list(fleet.addresses.values())) as cluster,
    ):
        ids = {peer.name: peer.id for peer in cluster.peers}
        with edge.Cluster.connect([fleet.addresses[name] for name in NAMES[:2]]) as two:
            plan = two.propose(MODEL, plan="pipeline").plan
        model = cluster.load(MODEL, plan=plan)
        undisturbed = model.generate(STORY, max_new_tokens=TOKENS, ignore_eos=True)
        shown = len(model.generate(STORY).token_ids)

        lost = next(name for name in NAMES if ids[name] == plan.devices[-1])
        print(f"\n  {STORY}\n  > ", end="", flush=True)
        stream = model.stream(STORY, max_new_tokens=TOKENS, ignore_eos=True)
        longest_s, last_s = 0.0, time.monotonic()
        for number, token in enumerate(stream, 1):
            now_s = time.monotonic()
            longest_s, last_s = max(longest_s, now_s - last_s if number > 1 else 0.0), now_s
            if number <= shown:
                print(token.text, end="", flush=True)
            if number == LOST_AFTER:
                print(f" [{lost} is killed]", end="", flush=True)
                fleet.kill(lost)
        reply = stream.reply()
        print()

        require(len(reply.recoveries) == 1, "the model should have gone on once")
        require(reply.token_ids == undisturbed.token_ids, "the tokens should be the same")
        names = [model.peers[device].name for device in model.plan.devices]
        print(
            f"\n  {reply.recoveries[0].reason}. It went on on {' and '.join(names)} after "
            f"{longest_s:.2f} s:\n  {len(reply.token_ids)} tokens, the same as without the loss."
        )
