"""What a shard's session is told before its weights are there."""

from __future__ import annotations

from pathlib import Path
from queue import SimpleQueue
from typing import Any

from edge.backends.interface import ShardWeights
from edge.engine.shard_engine import ShardSession
from edge.protocol.messages import Assignment
from edge.protocol.step import StepLimits
from edge.protocol.wire_rules import WireRules
from edge.weights.formats import weight_format
from edge.weights.layout import ShardLayout
from offload import Manifest
from partition import Plan, Shard, Stage
from tests.support.made_up_shards import SPEC, MadeUpBackend, MadeUpProgram
from transport import Frame, WireRule


class Remembering(MadeUpBackend):
    """With which layouts it was asked to load."""

    layouts: SimpleQueue[ShardLayout] = SimpleQueue()

    def load(self, spec: Any, layout: ShardLayout, *others: Any, **options: Any) -> MadeUpProgram:
        self.layouts.put(layout)
        return super().load(spec, layout, *others, **options)


def test_layers_that_are_to_come_from_disk_do_so_from_the_load_on() -> None:
    """A peer's memory may become less while a shard waits for others to be loaded."""
    shard = Shard(
        device="a",
        heads=range(SPEC.num_heads),
        ffn_columns=range(SPEC.ffn_columns),
        vocab=range(SPEC.vocab_size),
    )
    stage = Stage(layers=range(SPEC.num_layers), shards=(shard,))
    reports: SimpleQueue[Frame] = SimpleQueue()
    session = ShardSession(
        Assignment(
            session="s",
            model=SPEC,
            plan=Plan(model="m", version=0, stages=(stage,)),
            stage=0,
            rank=0,
            weight_format=weight_format("float32", 32, "fast"),
            manifest_digest="",
            weights_digest="w",
            limits=StepLimits(context_tokens=8, chunk_tokens=8, requests=1, cached_tokens=8),
            kv_dtype="float32",
            wire_rules=WireRules(sums=(WireRule(),), hops=()),
        ),
        reports.put,
    )
    try:
        session.stream(2).result()
        weights = ShardWeights(path=Path(), manifest=Manifest(tensors=(), total_bytes=0))
        session.load(Remembering(), weights).result()
        assert Remembering.layouts.get().streamed_layers == 2
    finally:
        session.close()
