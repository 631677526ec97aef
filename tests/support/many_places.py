"""A process that has opened many places for experts takes no more later on, when it is idle.

A script: it begins again with malloc set up as a daemon's, and looks at its own memory.
"""

from __future__ import annotations

import sys
from pathlib import Path

from edge.memory.model_sizes import model_facts
from edge.models.experts import Experts
from edge.models.families import llama_tensor_name
from edge.models.spec import LayerSpec
from edge.offload import MemoryStore
from edge.partition import Plan, Stage, whole_shard
from edge.system.heap import restart_with_malloc_settings
from edge.weights.float_matrices import FloatSource
from tests.contract.test_streamed_experts import FORMAT, logits
from tests.support.specs import made_up_weights, plain_layer, spec_of

LAYERS, EXPERTS = 2, 32
HIDDEN = COLUMNS = 256
EXPERT_BYTES = 3 * HIDDEN * COLUMNS * 4
SPEC = spec_of(
    [
        LayerSpec(
            mixer=plain_layer(num_heads=4, num_kv_heads=2, head_size=16).mixer,
            feed_forward=Experts(
                num_experts=EXPERTS, top_k=4, columns=COLUMNS, activation="silu", renormalized=True
            ),
        )
    ]
    * LAYERS,
    hidden_size=HIDDEN,
    vocab_size=40,
)
MOST_HOLES_BYTES = 4 << 20
"""It was 16 MB."""


def holes_bytes() -> int:
    """Memory that is not in use, and where the system makes huge pages of its own accord."""
    total = size = resident = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _colon, value = line.partition(":")
        if name == "Size":
            size = int(value.split()[0]) << 10
        elif name == "Rss":
            resident = int(value.split()[0]) << 10
        elif name == "VmFlags" and "hg" in value.split():
            total += size - resident
    return total


def check() -> None:
    found = holes_bytes()
    assert found <= MOST_HOLES_BYTES, f"{found:,} bytes of holes that the system fills when idle"


def main(folder: Path) -> None:
    facts = model_facts(SPEC, FORMAT, name="m", embedding_itemsize=4)
    shard = whole_shard("a", facts, vocab=range(SPEC.vocab_size))
    stage = Stage(layers=range(LAYERS), shards=(shard,))
    plan = Plan(model="m", version=0, stages=(stage,))
    source = FloatSource(MemoryStore(made_up_weights(SPEC)), llama_tensor_name)
    kept = LAYERS * EXPERTS
    _found, told = logits(plan, source, folder, LAYERS, kept=kept, look=check, spec=SPEC)
    ((reads, _bytes),) = told
    assert reads.nbytes >= LAYERS * EXPERTS * EXPERT_BYTES, "each had a place"


if __name__ == "__main__":
    restart_with_malloc_settings()
    main(Path(sys.argv[1]))
