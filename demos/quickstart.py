"""The Python API in a few lines: start peers, load a model over them, stream an answer."""

from __future__ import annotations

import edge
from edge.demos.bundled import MODEL, require, show_who_did_what


def run() -> None:
    """A pipeline over two peers on this machine."""
    with edge.Cluster.local(peers=2, threads=1) as cluster:
        model = cluster.load(MODEL, plan="pipeline")

        prompt = "Where does the cat live?"
        print(prompt, end="", flush=True)
        stream = model.stream(prompt, max_new_tokens=16, stop="?")
        for token in stream:
            print(token.text, end="", flush=True)
        print()

        reply = stream.reply()
        figures = reply.statistics
        print(
            f"\n{figures['new_tokens']} tokens ({reply.finish_reason}), the first after "
            f"{figures['first_token_s'] * 1000:.0f} ms, the last after "
            f"{figures['total_s'] * 1000:.0f} ms"
        )
        show_who_did_what(model)
        require(reply.text.strip().startswith("In the barn."), "the cat lives in the barn")
        require(len(model.plan.stages) == 2, "the plan should have a stage for each peer")
