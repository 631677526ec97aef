"""Layers whose experts are one node, against the same shards with a branch for each expert.

A script, as `halves` is: the process of the tests has sessions with pools of threads of their own.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from edge.backends.interface import ShardWeights
from edge.backends.onnx.self_check import SelfCheck
from edge.backends.ort.backend import OrtBackend
from edge.backends.registry import open_backend
from edge.memory.model_sizes import model_facts
from edge.memory.step_memory import load_bytes
from edge.models.experts import Experts, SharedExpert
from edge.models.spec import LayerSpec
from edge.offload import DerivedCache
from edge.partition import Plan, Stage, whole_shard
from edge.profiling.random_weights import written_weights
from edge.protocol.step import Step, StepLimits
from edge.transport import SoloCollective
from edge.weights.file_blocks import FileBlocks
from edge.weights.formats import WeightFormat
from edge.weights.layout import ShardLayout, shard_layout
from edge.weights.recipe import Recipe, Rule
from tests.support.formats import uniform_format
from tests.support.plans import slices
from tests.support.specs import plain_layer, spec_of
from tests.support.triton_shards import chunk, decode

Results = tuple[Counter[str], list[NDArray[np.float32]]]
"""How many nodes of each kind graphs have outside branches, and what steps give."""

_MIXER = plain_layer(num_heads=4, num_kv_heads=2, head_size=16).mixer
_ROUTED = Experts(num_experts=7, top_k=4, columns=192, activation="silu", renormalized=True)
SPEC = spec_of(
    [
        LayerSpec(mixer=_MIXER, feed_forward=_ROUTED),
        LayerSpec(
            mixer=_MIXER,
            feed_forward=replace(
                _ROUTED, scoring="sigmoid", has_correction=True, weight_scale=2.5,
                shared=SharedExpert(columns=64, is_gated=True),
            ),
        ),
        LayerSpec(mixer=_MIXER, feed_forward=replace(_ROUTED, bias=True)),
        LayerSpec(mixer=_MIXER, feed_forward=replace(_ROUTED, activation="gelu")),
    ],
    hidden_size=64,
    vocab_size=40,
)  # fmt: skip
STACKED_LAYERS = 2
"""The others have a bias, or another activation."""
LIMITS = StepLimits(context_tokens=48, chunk_tokens=32, requests=3, cached_tokens=96)
_STEPS = (
    chunk("a", [7 * index % SPEC.vocab_size for index in range(11)]),
    chunk("a", [12], 11),
    chunk("b", [1, 2], rows=0),
    decode(("b", 3, 2), ("a", 13, 12)),
)


def layouts() -> Iterator[tuple[str, ShardLayout]]:
    """A whole one, parts with 128 and 64 of the experts' columns, and with 3 and 4 of them."""
    facts = model_facts(SPEC, uniform_format("int4"), name="m", embedding_itemsize=4)
    vocab = range(SPEC.vocab_size)
    whole = Stage(layers=range(SPEC.num_layers), shards=(whole_shard("a", facts, vocab=vocab),))

    def part(device: str, heads: range, columns: range, vocab: range) -> Any:
        parts = slices(*((heads, columns) for _kind in facts.kinds))
        return whole_shard(device, facts, vocab=vocab).of_slices(device, parts, vocab=vocab)

    parts = Stage(
        layers=range(SPEC.num_layers),
        shards=(
            part("a", range(1), range(128), range(10)),
            part("b", range(1, 4), range(128, 192), range(10, 40)),
        ),
    )
    numbers = (0, 2, 5), (1, 3, 4, 6)
    of_some = replace(
        parts,
        shards=tuple(
            shard.with_experts((own,) * SPEC.num_layers)
            for shard, own in zip(parts.slices, numbers, strict=True)
        ),
    )
    for name, stage in (("whole", whole), ("parts", parts), ("experts as wholes", of_some)):
        plan = Plan(model="m", version=0, stages=(stage,))
        for rank in range(len(stage.shards)):
            yield f"{name}, {rank}", shard_layout(SPEC, plan, stage=0, rank=rank)


def _agreed(*_arguments: Any, **_named: Any) -> SelfCheck:
    return SelfCheck(of_chunks=False, of_pairs=False, of_single=False)


def load(
    weights: ShardWeights, layout: ShardLayout, form: WeightFormat, steps: Sequence[Step] = _STEPS
) -> Results:
    opened = open_backend("ort", threads=2)
    assert isinstance(opened, OrtBackend)
    program = opened.load(SPEC, layout, weights, form, limits=LIMITS)
    try:
        graphs = [onnx.load_from_string(s.model) for s in program._graphs.segments]
        nodes = Counter(node.op_type for graph in graphs for node in graph.graph.node)
        outputs = [program.forward(step, None, SoloCollective()).copy() for step in steps]
    finally:
        program.close()
    return nodes, outputs


def main(folder: Path, name: str) -> None:
    form = uniform_format(name)
    for number, (what, layout) in enumerate(layouts()):
        packed = DerivedCache(folder / f"packed {name} {what}", 1 << 30)
        most_bytes = load_bytes(layout, form)
        with written_weights(layout, form, folder) as weights:
            stacked, found = load(replace(weights, packed=packed), layout, form)
            with pytest.MonkeyPatch.context() as patch:
                # What else an operator may be agrees, or the load above would have failed.
                patch.setattr("edge.backends.ort.backend.run_self_check", _agreed)
                none, expected = load(weights, layout, form)
                if not number:
                    tight = replace(weights, packed=packed, load_room_bytes=most_bytes - 1)
                    tight_nodes, _outputs = load(tight, layout, form, ())
                    assert not tight_nodes["QMoE"], "what it is packed from has no room"
            assert (none["QMoE"], stacked["QMoE"]) == (0, STACKED_LAYERS), what
        for one, other in zip(found, expected, strict=True):
            # Inputs of products are rounded: where they lie between two codes, to another one.
            assert np.abs(one - other).max(initial=0) < 0.01 * np.abs(other).max(initial=1)
        assert not list(folder.rglob("experts.*")), "what they are packed from is gone"


def main_of_files(folder: Path) -> None:
    """Products with all experts in blocks of files, of several types: with the bits of branches."""
    rules = Rule("down.weight", FileBlocks("Q8_0")), Rule("up.weight", FileBlocks("IQ4_NL"))
    recipe = Recipe(FileBlocks("Q5_1"), rules)
    form = WeightFormat(name="as stored", recipe=recipe, accuracy="fast")
    for what, layout in itertools.islice(layouts(), 0, None, 2):  # one of each plan
        with written_weights(layout, form, folder) as weights:
            joined, found = load(weights, layout, form)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("edge.backends.ort.backend.run_self_check", _agreed)
                tight = replace(weights, load_room_bytes=load_bytes(layout, form) - 1)
                apart, expected = load(tight, layout, form)
        parts = [layout.layer(number).feed_forward for number in layout.layers]
        branches = sum(len(part.held) for part in parts if isinstance(part, Experts))
        assert apart["If"] - joined["If"] == branches, what
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one, other, what)


if __name__ == "__main__":
    if sys.argv[2] == "files":
        main_of_files(Path(sys.argv[1]))
    else:
        main(Path(sys.argv[1]), sys.argv[2])
