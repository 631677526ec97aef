"""Unequal devices get unequal slices: a plan by hand in the proportion 4 : 2 : 1."""

from __future__ import annotations

from edge.demos.bundled import MODEL, STORY, show_same_tokens
from edge.partition import Plan, Shard, Stage, split_by_shares

SHARES = (4, 2, 1)
HEADS, FFN_COLUMNS, VOCABULARY, LAYERS = 8, 352, 768, 6
BLOCK_SIZE = 32
"""int4 weights share a scale in blocks, so feed-forward columns are cut between blocks."""

QUESTIONS = ["Why is the sky blue?", "Who lives in the mill?", STORY]


def uneven_plan(devices: list[str]) -> Plan:
    """One stage in which each device has its share of every layer."""
    heads = split_by_shares(HEADS, SHARES)
    columns = split_by_shares(FFN_COLUMNS, SHARES, BLOCK_SIZE)
    vocabulary = split_by_shares(VOCABULARY, SHARES)
    shards = tuple(
        Shard(device=device, heads=heads[i], ffn_columns=columns[i], vocab=vocabulary[i])
        for i, device in enumerate(devices)
    )
    return Plan(model=MODEL.name, version=1, stages=(Stage(layers=range(LAYERS), shards=shards),))


def run() -> None:
    """The uneven split gives the same tokens as one peer alone."""
    show_same_tokens(peers=3, plan_of=uneven_plan, asked=QUESTIONS)
