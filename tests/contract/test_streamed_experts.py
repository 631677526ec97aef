"""Experts that come from disk as tokens are routed to them give the bits of experts in memory.

Also a script: the process of the tests has sessions with pools of threads of their own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge.backends.interface import WeightReads
from edge.backends.ort.program import OrtProgram
from edge.backends.registry import open_backend
from edge.memory.model_sizes import model_facts
from edge.models.experts import Experts, SharedExpert
from edge.models.families import llama_tensor_name
from edge.models.gated_mlp import GatedMlp
from edge.models.spec import LayerSpec, ModelSpec
from edge.offload import DerivedCache, MemoryStore, StoreCorruptError
from edge.offload.cache.verified_shard import mark_intact
from edge.partition import Plan, Stage, whole_shard
from edge.partition.plan.expert_tiers import PLACE_BYTES
from edge.protocol.step import StepLimits
from edge.system.heap import with_malloc_settings
from edge.weights.float_matrices import FloatSource
from edge.weights.layout import shard_layout
from tests.support.formats import uniform_format
from tests.support.plans import slices
from tests.support.processes import run_module
from tests.support.slow_cases import shown_in_parts
from tests.support.specs import made_up_weights, plain_layer, spec_of
from tests.support.transport_pairs import group
from tests.support.triton_shards import TritonPlan, chunk, decode, shipped

_MIXER = plain_layer(num_heads=4, num_kv_heads=2, head_size=16).mixer
_ROUTED = Experts(
    num_experts=24, top_k=3, columns=64, activation="silu", renormalized=True, bias=True,
)  # fmt: skip
SPARSE = LayerSpec(mixer=_MIXER, feed_forward=_ROUTED)
SHARED = LayerSpec(
    mixer=_MIXER,
    feed_forward=replace(
        _ROUTED, num_experts=7, top_k=2, bias=False, shared=SharedExpert(columns=64, is_gated=True)
    ),
)
DENSE = LayerSpec(
    mixer=_MIXER,
    feed_forward=GatedMlp(
        columns=192, activation="silu", bias=False, has_norm=True, has_post_norm=False
    ),
)
SPEC = spec_of([SPARSE, DENSE, SHARED, SPARSE], hidden_size=64, vocab_size=40)
FORMAT = uniform_format("float32")
LIMITS = StepLimits(context_tokens=48, chunk_tokens=32, requests=3, cached_tokens=96)
NUM_LAYERS = SPEC.num_layers


def plans(facts: Any) -> dict[str, Plan]:
    half = range(NUM_LAYERS // 2), range(NUM_LAYERS // 2, NUM_LAYERS)

    def stage(layers: range, device: str, vocab: range) -> Stage:
        return Stage(layers=layers, shards=(whole_shard(device, facts, vocab=vocab),))

    def shard(device: str, vocab: range, heads: range, columns: dict[int, range]) -> Any:
        parts = slices(*((heads, columns[kind.ffn_columns]) for kind in facts.kinds))
        return whole_shard(device, facts, vocab=vocab).of_slices(device, parts, vocab=vocab)

    tensor = Stage(
        layers=range(NUM_LAYERS),
        shards=(
            shard("a", range(10), range(1), {64: range(32), 192: range(64)}),
            shard("b", range(10, 40), range(1, 4), {64: range(32, 64), 192: range(64, 192)}),
        ),
    )
    stages = {
        "solo": (stage(range(NUM_LAYERS), "a", range(40)),),
        "pipeline": (stage(half[0], "a", range(40)), stage(half[1], "b", range(40))),
        "tensor": (tensor,),
    }
    return {name: Plan(model="m", version=0, stages=each) for name, each in stages.items()}


def logits(
    plan: Plan,
    source: Any,
    folder: Path,
    streamed: int | None,
    *,
    first: int | None = None,
    kept: int = 0,
    look: Callable[[], None] | None = None,
    spec: ModelSpec = SPEC,
) -> tuple[list[np.ndarray[Any, Any]], list[tuple[WeightReads, int]]]:
    """Of chunks, tokens and batches; and of each shard what it read, and what its experts took.

    streamed: None for layers that stay. first: with which number it is loaded instead, in no more
    room than one matrix takes. kept: experts more than there is room for beside the layers that
    stay. look: is called behind the last step.
    """
    opened = open_backend("ort", threads=1)
    packed = DerivedCache(folder / "packed", 1 << 30)
    tokens = [7 * index % spec.vocab_size for index in range(28)]
    found: list[np.ndarray[Any, Any]] = []
    told: list[tuple[WeightReads, int]] = []
    with ExitStack() as stack:
        programs: list[list[Any]] = []
        members = []
        for number, each in enumerate(plan.stages):
            programs.append([])
            members.append(stack.enter_context(group("memory", len(each.shards))))
            for rank in range(len(each.shards)):
                layout = shard_layout(spec, plan, stage=number, rank=rank)
                weights = shipped(
                    layout,
                    source,
                    FORMAT,
                    folder / f"{number}-{rank}",
                    fingerprint=f"{number}{rank}",
                )
                if streamed is not None:
                    count = min(streamed if first is None else first, len(layout.layers))
                    layout = replace(layout, streamed_layers=count, kept_experts=kept)
                    weights = replace(weights, packed=packed, load_room_bytes=0)
                program = opened.load(spec, layout, weights, FORMAT, limits=LIMITS)
                stack.callback(program.close)
                if first is not None:
                    program.stream(streamed or 0)
                programs[-1].append(program)
        model = TritonPlan(programs, members)
        for step in (
            chunk("a", tokens[:11]),
            chunk("a", tokens[11:12], 11),
            chunk("b", tokens[:2], rows=0),
            decode(("b", tokens[2], 2), ("a", tokens[12], 12)),
            *(chunk("a", [token], 13 + index) for index, token in enumerate(tokens[13:])),
        ):
            found.append(model.forward(step))
        for program in (each for stage in programs for each in stage):
            assert isinstance(program, OrtProgram)
            streams = program._graphs.streamed
            cache = None if streams is None else streams._experts
            if cache is not None:
                told.append((program.weight_reads, cache.held_bytes))
                assert cache.held_bytes <= cache._capacity_bytes
        if look is not None:
            look()
    return found, told


def main(folder: Path, name: str) -> None:
    source = FloatSource(MemoryStore(made_up_weights(SPEC)), llama_tensor_name)
    facts = model_facts(SPEC, FORMAT, name="m", embedding_itemsize=4)
    held = []
    plan = plans(facts)[name]
    plan.validate(facts, None)
    expected, _ = logits(plan, source, folder / name, None)
    for streamed in (NUM_LAYERS, NUM_LAYERS - 2):
        found, told = logits(plan, source, folder / f"{name}-{streamed}", streamed)
        for one, other in zip(expected, found, strict=True):
            assert np.array_equal(one, other), (name, streamed)
        assert len(told) == len(plan.devices)
        assert all(reads.experts > reads.experts_read for reads, _bytes in told)
        held += [nbytes for _reads, nbytes in told]
        if name == "tensor" and streamed == NUM_LAYERS:
            assert all(reads.experts_read for reads, _bytes in told)
            # As many more as are kept have room, and are not read again.
            more, said = logits(plan, source, folder / f"{name}-{streamed}", streamed, kept=9)
            assert all(map(np.array_equal, expected, more))
            for (few_reads, few), (many_reads, many) in zip(told, said, strict=True):
                assert many > few
                assert many_reads.experts_read < few_reads.experts_read
    if name == "solo":
        found, told = logits(plan, source, folder / f"{name}-7", 0, first=0)
        assert not told
        assert all(map(np.array_equal, expected, found))
        found, told = logits(plan, source, folder / f"{name}-7", NUM_LAYERS, first=0)
        assert told
        assert all(map(np.array_equal, expected, found))
        _check_damage(plan, source, folder / f"{name}-7")
    half_expert_bytes = 4 * 3 * SPEC.hidden_size * _ROUTED.columns // 2
    one_layer_bytes = _ROUTED.num_experts * (half_expert_bytes + PLACE_BYTES)
    assert min(held) < one_layer_bytes, "a step's experts of one layer take turns"


def _check_damage(plan: Plan, source: Any, folder: Path) -> None:
    """Packed weights that are not what was written are told with their file, and made again."""
    files = list(folder.glob("packed/*/weights"))
    for file in files:
        content = np.fromfile(file, np.uint8)
        # Experts of the layers in the middle, which no load looks at.
        content[len(content) // 2 :][:40_000] ^= 1
        file.write_bytes(content.tobytes())
        mark_intact(file.parent)  # as a disk does that gives back other bytes than it was given
    with pytest.raises(StoreCorruptError, match="has other bytes") as raised:
        logits(plan, source, folder, NUM_LAYERS)
    assert any(str(file) in str(raised.value) for file in files)
    logits(plan, source, folder, NUM_LAYERS)


@pytest.mark.parametrize(
    "plan",
    [
        "tensor",
        *(
            pytest.param(plan, marks=shown_in_parts("e2e/test_streamed_layers.py"))
            for plan in ("solo", "pipeline")
        ),
    ],
)
@pytest.mark.linux_ways
def test_whole_in_stages_and_in_parts_with_room_for_many_and_for_few(
    tmp_path: Path, plan: str
) -> None:
    run_module(__name__, tmp_path, plan)


@pytest.mark.skipif(sys.platform != "linux", reason="looks at what Linux tells of memory")
@pytest.mark.linux_ways
def test_places_leave_no_holes_that_the_system_fills_when_it_is_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in with_malloc_settings(os.environ).items():  # else it begins twice
        monkeypatch.setenv(name, value)
    run_module("tests.support.many_places", tmp_path)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
