"""Layers of one model that differ in heads, head sizes, windows, rotation, biases, norms and width
are planned, cut, lowered and computed as a whole model of them in numpy is.

Also a script: the process of the tests has sessions with pools of threads of their own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from edge.backends.interface import ShardWeights, StageProgram
from edge.backends.registry import open_backend
from edge.memory.model_sizes import model_facts
from edge.models.families import llama_tensor_name
from edge.models.rotary import NO_ROTARY, Rotary
from edge.offload import DerivedCache, MemoryStore
from edge.partition import (
    ClusterSpec,
    DeviceSpec,
    LinkSpec,
    Plan,
    Shard,
    Stage,
    Workload,
    choose,
    whole_shard,
)
from edge.protocol.step import StepLimits
from edge.weights.float_matrices import FloatSource
from edge.weights.layout import shard_layout
from tests.support import triton_face
from tests.support.facts import plain_rates
from tests.support.formats import uniform_format
from tests.support.plans import slices
from tests.support.processes import run_module
from tests.support.reference_model import ReferenceModel
from tests.support.specs import made_up_weights, plain_layer, spec_of
from tests.support.transport_pairs import group
from tests.support.triton_shards import TritonPlan, chunk, decode, shipped, without_self_check

FULL = plain_layer(
    num_heads=2, num_kv_heads=2, head_size=16, ffn_columns=48, qkv_bias=True, has_post_norm=True,
    mlp_has_norm=False, mlp_has_post_norm=True, score_scale=0.4, soft_cap=1.5,
    activation="gelu_tanh",
    rotary=Rotary(
        inverse_frequencies=tuple(10000.0 ** -(i / 8) for i in range(4)), scale=1.2,
        is_interleaved=True,
    ),
)  # fmt: skip
NARROW = plain_layer(
    num_heads=4, num_kv_heads=2, head_size=8, ffn_columns=20, window=3, query_key_norm=True,
    output_bias=True, mlp_bias=True, rotary=NO_ROTARY, mlp_has_post_norm=True,
)  # fmt: skip
SPEC = spec_of(
    [FULL, NARROW, FULL, NARROW, NARROW], hidden_size=32, vocab_size=40,
    embedding_scale=3.0, logit_scale=0.5, logit_soft_cap=1.5,
)  # fmt: skip
FORMAT = uniform_format("float32")
FACTS = model_facts(SPEC, FORMAT, name="made-up", embedding_itemsize=4)
LIMITS = StepLimits(context_tokens=48, chunk_tokens=32, requests=3, cached_tokens=96)
LARGEST_DIFFERENCE = 1e-4
TOKENS = 8
"""More than the window."""


def stage(layers: range, vocab: int) -> Stage:
    """Over two devices, each kind of layer cut in its own way; the second has no narrow heads."""
    first = slices((range(1), range(30)), (range(4), range(8)))
    second = slices((range(1, 2), range(30, 48)), (range(4, 4), range(8, 20)))
    shards = (
        Shard.of_slices(f"{layers.start}a", first, vocab=range(min(vocab, 10))),
        Shard.of_slices(f"{layers.start}b", second, vocab=range(min(vocab, 10), vocab)),
    )
    return Stage(layers=layers, shards=shards)


def chosen_plan() -> Plan:
    """What the planner makes for two unequal devices that must share every layer."""
    rates = plain_rates(
        (1, 32), (1e-9, 2e-9), attention_s=(1e-9, 1e-9), run_s=1e-6, sample_s=1e-6, step_s=1e-6
    )
    slow = replace(rates, slice_seconds_per_byte=(2e-9, 4e-9), seconds_per_byte=(2e-9, 4e-9))
    devices = [
        DeviceSpec(id=id, name=id, memory_bytes=1 << 30, threads=1, rates=each)
        for id, each in (("a", rates), ("b", slow))
    ]
    links = [
        LinkSpec(source=source, target=target, latency_s=1e-6, bytes_per_s=1e9)
        for source, target in (("a", "b"), ("b", "a"))
    ]
    cluster = ClusterSpec(devices=tuple(devices), links=tuple(links))
    return choose(FACTS, cluster, Workload(), parallel="tensor").plan


PLANS = {
    "solo": Plan(
        model="made-up",
        version=0,
        stages=(
            Stage(layers=range(5), shards=(whole_shard("a", FACTS, vocab=range(40)),)),
        ),
    ),
    "tensor": Plan(model="made-up", version=0, stages=(stage(range(5), 40),)),
    "pipeline of unlike stages": Plan(
        model="made-up",
        version=0,
        stages=(
            stage(range(1), 40),
            Stage(layers=range(1, 3), shards=(whole_shard("c", FACTS, vocab=range(0)),)),
            stage(range(3, 5), 40),
        ),
    ),
}  # fmt: skip


WEIGHTS = made_up_weights(SPEC)


@contextmanager
def loaded(
    backend: str, plan: Plan, folder: Path, *, streams: bool, has_self_check: bool
) -> Iterator[TritonPlan]:
    plan.validate(FACTS, None)
    plan = Plan.from_json(plan.to_json())
    source = FloatSource(MemoryStore(WEIGHTS), llama_tensor_name)
    opened = open_backend(backend, threads=1)
    packed = DerivedCache(folder / "packed", 1 << 30)
    with ExitStack() as stack:
        if not has_self_check:
            stack.enter_context(without_self_check())
        programs: list[list[StageProgram]] = []
        members = []
        for number, each in enumerate(plan.stages):
            programs.append([])
            members.append(stack.enter_context(group("memory", len(each.shards))))
            for rank in range(len(each.shards)):
                layout = shard_layout(SPEC, plan, stage=number, rank=rank)
                path = folder / f"{number}-{rank}"
                fingerprint = f"{plan} {number} {rank}"
                weights: ShardWeights = shipped(
                    layout, source, FORMAT, path, fingerprint=fingerprint
                )
                if streams:
                    layout = replace(layout, streamed_layers=len(layout.layers))
                    weights = replace(weights, packed=packed)
                program = opened.load(SPEC, layout, weights, FORMAT, limits=LIMITS)
                stack.callback(program.close)
                programs[-1].append(program)
        yield TritonPlan(programs, members)


def check(backend: str, name: str, folder: Path, *, streams: bool = False) -> None:
    """A chunk, a token after it, and a batch of requests at different places."""
    plan = chosen_plan() if name == "chosen" else PLANS[name]
    reference = ReferenceModel(SimpleNamespace(spec=SPEC, llama_weights=WEIGHTS))  # type: ignore[arg-type]
    tokens = [7 * index % SPEC.vocab_size for index in range(TOKENS)]
    expected = reference.logits(tokens)
    # Interpreted kernels check themselves on whole layers of each kind, and on streamed slices.
    has_self_check = backend != "triton" or name == "solo" or streams
    with loaded(backend, plan, folder, streams=streams, has_self_check=has_self_check) as model:
        parts = [
            model.forward(chunk("a", tokens[:6]))[0],
            model.forward(chunk("a", tokens[6:7], 6))[0],
        ]
        model.forward(chunk("b", tokens[:2], rows=0))
        both = model.forward(decode(("b", tokens[2], 2), ("a", tokens[7], 7)))
    found = np.concatenate([*parts, both[1]])
    assert np.abs(found - expected).max() <= LARGEST_DIFFERENCE
    assert np.abs(both[0] - expected[2:3]).max() <= LARGEST_DIFFERENCE


@pytest.mark.linux_ways
def test_onnx_runtime_computes_them_over_every_plan_streamed_and_not(tmp_path: Path) -> None:
    run_module(__name__, tmp_path)


@pytest.mark.parametrize("name", [*(name for name in PLANS if name != "tensor"), "chosen"])
def test_triton_computes_them(name: str, tmp_path: Path) -> None:
    triton_face.only_interpreted()
    check("triton", name, tmp_path)


def test_triton_streams_them(tmp_path: Path) -> None:
    check("triton", "tensor", tmp_path, streams=True)


def test_the_planner_cuts_each_kind_in_its_own_way() -> None:
    plan = chosen_plan()
    plan.validate(FACTS, None)
    (stage,) = plan.stages
    for kind, layer in enumerate((FULL, NARROW)):
        parts = [shard.slice(kind) for shard in stage.slices]
        assert sum(len(part.heads) for part in parts) == layer.mixer.num_units
        assert sum(len(part.ffn_columns) for part in parts) == layer.feed_forward.columns
        assert len(parts[0].ffn_columns) > len(parts[1].ffn_columns), "it is twice as fast"


if __name__ == "__main__":
    for count, name in enumerate((*PLANS, "chosen")):
        for streams in (False, True):
            own = Path(sys.argv[1]) / f"{count}{streams}"
            own.mkdir()
            check("ort", name, own, streams=streams)
