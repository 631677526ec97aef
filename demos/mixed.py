"""Pipeline and tensor parallel at once: two stages of layers, each cut over two peers."""

from __future__ import annotations

from edge.demos.bundled import MODEL, STORY, show_same_tokens
from edge.partition import Plan, Shard, Stage

QUESTIONS = ["Why is snow white?", "What is 3 times 5?", STORY]


def mixed_plan(devices: list[str]) -> Plan:
    """Written out, so that every range of a plan can be seen once."""
    a, b, c, d = devices
    first = (
        Shard(device=a, heads=range(0, 4), ffn_columns=range(0, 160), vocab=range(0, 384)),
        Shard(device=b, heads=range(4, 8), ffn_columns=range(160, 352), vocab=range(384, 768)),
    )
    second = (
        Shard(device=c, heads=range(0, 6), ffn_columns=range(0, 256), vocab=range(0, 512)),
        Shard(device=d, heads=range(6, 8), ffn_columns=range(256, 352), vocab=range(512, 768)),
    )
    stages = (
        Stage(layers=range(0, 2), shards=first),
        Stage(layers=range(2, 6), shards=second),
    )
    return Plan(model=MODEL.name, version=1, stages=stages)


def run() -> None:
    """Four peers in two stages give the same tokens as one peer alone."""
    show_same_tokens(peers=4, plan_of=mixed_plan, asked=QUESTIONS)
