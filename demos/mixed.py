"""Pipeline and tensor parallel at once: two stages of layers, each cut over two peers."""

from __future__ import annotations

import edge
from demos.bundled import MODEL, STORY, answers, require, show_who_did_what
from partition import Plan, Shard, Stage

QUESTIONS = ["Why is snow white?", "What is 3 times 5?", STORY]


def mixed_plan(devices: list[str]) -> Plan:
    """Written out, so that every range of a plan can be seen once."""
    a, b, c, d = devices
    return Plan(
        model=MODEL.name,
        version=1,
        stages=(
            Stage(
                layers=range(0, 2),
                shards=(
                    Shard(
                        device=a,
                        heads=range(0, 4),
                        ffn_columns=range(0, 160),
                        vocab=range(0, 384),
                    ),
                    Shard(
                        device=b,
                        heads=range(4, 8),
                        ffn_columns=range(160, 352),
                        vocab=range(384, 768),
                    ),
                ),
            ),
            Stage(
                layers=range(2, 6),
                shards=(
                    Shard(
                        device=c,
                        heads=range(0, 6),
                        ffn_columns=range(0, 256),
                        vocab=range(0, 512),
                    ),
                    Shard(
                        device=d,
                        heads=range(6, 8),
                        ffn_columns=range(256, 352),
                        vocab=range(512, 768),
                    ),
                ),
            ),
        ),
    )


def run() -> None:
    """Four peers in two stages give the same tokens as one peer alone."""
    with edge.Cluster.local(peers=4, threads=1) as cluster:
        devices = [peer.name for peer in cluster.peers]
        with edge.Cluster.connect([cluster.peers[0].address]) as one:
            alone = answers(one.load(MODEL), QUESTIONS)
        split = cluster.load(MODEL, plan=mixed_plan(devices))
        together = answers(split, QUESTIONS)
        show_who_did_what(split)
        require(alone == together, "the split changed the tokens")
        count = sum(map(len, together))
        print(f"\n  {count} tokens in {len(QUESTIONS)} answers: the same as from one peer alone.")
