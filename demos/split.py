"""One model cut over three peers: each computes its heads and columns of every layer."""

from __future__ import annotations

import edge
from edge.demos.bundled import MODEL, STORY, ask, require, show_who_did_what

PEERS = 3
"""They do not divide the model's eight heads, so the shares are uneven by themselves."""


def run() -> None:
    """What `make demo` runs: three daemons of their own, real sockets between them."""
    print(f"Starting {PEERS} peers on this machine and cutting the bundled model over them ...")
    with edge.Cluster.local(peers=PEERS, threads=1) as cluster:
        model = cluster.load(MODEL, plan="tensor")
        ask(model, "Where does the cat live?")
        ask(model, "What is 7 plus 5?")
        reply = ask(model, STORY)
        show_who_did_what(model)
        require(len(model.plan.devices) == PEERS, f"all {PEERS} peers should take part")
        print(
            f"\n  Every token passed through all {PEERS} of them, "
            f"{reply.tokens_per_s:.0f} times a second."
        )
