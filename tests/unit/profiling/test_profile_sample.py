"""What a peer would measure itself with: real shapes, enough bytes, never more than its budget."""

from __future__ import annotations

import errno
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge.backends.interface import ShardWeights
from edge.errors import CapacityError
from edge.kernels.matmul_nbits.reference import packed_shapes
from edge.memory.model_sizes import model_facts
from edge.models.experts import Experts
from edge.models.spec import LayerSpec, ModelSpec
from edge.partition import Plan, Shard, Stage, Workload, memory_use
from edge.profiling import random_weights
from edge.profiling.profile import agreed, in_words, spread_of
from edge.profiling.random_weights import written_bytes, written_weights
from edge.profiling.sample import (
    CHUNK_ROWS,
    CONTEXT_TOKENS,
    REQUESTS,
    SAMPLE_BYTES,
    attention_sample,
    expert_sample,
    sample_budget_bytes,
    step_sample,
    weights_sample,
)
from edge.weights.formats import WeightFormat
from edge.weights.layout import ShardLayout, shard_layout
from tests.support.formats import uniform_format
from tests.support.plans import make_plan
from tests.support.specs import changed, plain_layer, shape, shared_keys_spec, spec_of
from tests.unit.protocol.test_assignment import SPEC

FORMATS = [uniform_format("float32"), uniform_format("int8", 128), uniform_format("int4")]
INT4 = uniform_format("int4")
PLENTY = 1 << 40


def spec(**sizes: Any) -> ModelSpec:
    """A model of 1.1 B weights, or another."""
    values = {
        "num_layers": 22, "hidden_size": 2048, "num_heads": 32, "num_kv_heads": 4,
        "head_size": 64, "ffn_columns": 5632, "vocab_size": 32_000, "context_tokens": 2048,
        **sizes,
    }  # fmt: skip
    return changed(SPEC, **values)


def layer_bytes(model: ModelSpec, format_: WeightFormat) -> float:
    """Of one layer in the middle, as a plan counts it."""
    facts = model_facts(model, format_, name="m", embedding_itemsize=4)
    shards = [
        Shard(
            device=f"d{number}",
            heads=range(shape(model).num_heads),
            ffn_columns=range(shape(model).ffn_columns),
            vocab=range(0 if number == 1 else model.vocab_size),
        )
        for number in range(3)
    ]
    last = model.num_layers - 1
    layers = (range(1), range(1, last), range(last, last + 1))
    plan = Plan(
        model="m",
        version=0,
        stages=tuple(
            Stage(layers=run, shards=(shard,)) for run, shard in zip(layers, shards, strict=True)
        ),
    )
    use = memory_use(plan, facts, Workload(prompt_tokens=1))
    return use["d1"].weight_bytes / (last - 1)


@pytest.mark.parametrize("format_", FORMATS, ids=lambda each: each.name)
def test_as_many_layers_as_exceed_the_caches(format_: WeightFormat) -> None:
    model = spec()
    sample = weights_sample(model, format_, PLENTY)
    per_layer = layer_bytes(model, format_)
    assert sample.nbytes("whole", format_) == sample.num_layers * per_layer
    assert SAMPLE_BYTES <= sample.nbytes("whole", format_) < SAMPLE_BYTES + per_layer
    assert (sample.chunk_rows, sample.is_narrowed) == (CHUNK_ROWS[0], False)
    for name in ("hidden_size", "num_heads", "num_kv_heads", "head_size", "ffn_columns"):
        assert getattr(shape(sample.spec), name) == getattr(shape(model), name)
    assert in_words(sample) == f"{sample.num_layers} layers"


def test_at_most_the_layers_of_the_model() -> None:
    sample = weights_sample(spec(num_layers=3), INT4, PLENTY)
    assert sample.num_layers == 3
    assert sample.nbytes("whole", INT4) < SAMPLE_BYTES


def test_windows_are_those_of_layers_from_all_over_the_model() -> None:
    windows = tuple(None if layer % 2 else 8 for layer in range(22))
    sample = weights_sample(changed(spec(), windows=windows), INT4, PLENTY)
    assert set(shape(sample.spec).windows[1:-1]) == {None, 8}


@pytest.mark.parametrize("format_", FORMATS, ids=lambda each: each.name)
@pytest.mark.parametrize("sizes", [{}, {"num_heads": 5, "num_kv_heads": 5, "ffn_columns": 1000}])
def test_half_is_a_shard_of_two(format_: WeightFormat, sizes: dict[str, int]) -> None:
    sample = weights_sample(spec(**sizes), format_, PLENTY)
    whole, half = sample.nbytes("whole", format_), sample.nbytes("half", format_)
    assert 0.45 * whole < half < 0.65 * whole
    assert sample.layout("half", format_).is_split
    assert not sample.layout("whole", format_).is_split


@pytest.mark.parametrize("budget_mib", [40, 64, 128, 256, 1024])
@pytest.mark.parametrize("format_", FORMATS, ids=lambda each: each.name)
def test_all_widths_together_stay_within_the_budget(format_: WeightFormat, budget_mib: int) -> None:
    budget_bytes = budget_mib << 20
    sample = weights_sample(spec(), format_, budget_bytes)
    total = sum(sample.nbytes(width, format_) for width in ("whole", "half", "narrow"))
    assert total < 1.05 * budget_bytes, "but for the norms, which every slice has whole"
    assert sample.num_layers == 1 or not sample.is_narrowed


def test_a_layer_that_is_too_large_gets_narrower_in_its_real_depth() -> None:
    model = spec(num_layers=100, hidden_size=16_384, num_heads=128, num_kv_heads=8,
                 head_size=128, ffn_columns=53_248)  # fmt: skip
    sample = weights_sample(model, INT4, 512 << 20)
    assert sample.is_narrowed
    assert sample.spec.hidden_size == 16_384
    assert shape(sample.spec).num_heads == 16 * shape(sample.spec).num_kv_heads
    assert shape(sample.spec).num_kv_heads < 8
    assert shape(sample.spec).ffn_columns % 32 == 0
    assert sample.nbytes("whole", INT4) <= 512 << 20
    assert "a whole one does not fit" in in_words(sample)


@pytest.mark.parametrize(
    ("sizes", "budget_bytes"),
    [
        ({}, 0),
        ({}, 1 << 20),
        ({"hidden_size": 1 << 24, "ffn_columns": 1 << 24}, 1 << 30),
        ({"num_heads": 1 << 24, "num_kv_heads": 1 << 10}, 1 << 34),
        ({"head_size": 1 << 20}, 1 << 28),
    ],
    ids=str,
)
def test_what_no_budget_holds_is_refused_before_anything_is_made(
    sizes: dict[str, int], budget_bytes: int
) -> None:
    with pytest.raises(CapacityError, match=r"measuring this model takes .* --memory"):
        weights_sample(spec(**sizes), INT4, budget_bytes)


def test_a_quarter_of_the_memory_may_be_used_and_a_half_of_little() -> None:
    assert sample_budget_bytes(1 << 30) == 1 << 28
    assert sample_budget_bytes(64 << 20) == 32 << 20
    assert sample_budget_bytes(128 << 20) == 48 << 20


def every_sample() -> list[tuple[ModelSpec, ShardLayout, WeightFormat]]:
    found = []
    for format_ in FORMATS:
        sample = weights_sample(SPEC, format_, 4 << 20)
        found += [
            (sample.spec, sample.layout(width, format_), format_) for width in ("whole", "half")
        ]
        attention = attention_sample(SPEC, format_, 4 << 20)
        found.append((attention.spec, attention.layout("whole", format_), format_))
        of_tokens = weights_sample(shared_keys_spec(), format_, 4 << 20)
        found += [
            (of_tokens.spec, of_tokens.layout(width, format_), format_)
            for width in ("whole", "half")
        ]
        tiny = step_sample(SPEC, format_)
        whole = Shard(device="a", heads=range(1), ffn_columns=range(shape(tiny).ffn_columns),
                      vocab=range(tiny.vocab_size))  # fmt: skip
        plan = Plan(model="m", version=0, stages=(Stage(layers=range(1), shards=(whole,)),))
        found.append((tiny, shard_layout(tiny, plan, stage=0, rank=0), format_))
    return found


@pytest.mark.parametrize(("model", "layout", "format_"), every_sample(), ids=lambda each: "")
def test_the_file_holds_every_tensor_of_the_layout(
    model: ModelSpec, layout: ShardLayout, format_: WeightFormat, tmp_path: Path
) -> None:
    with written_weights(layout, format_, tmp_path / "new") as weights:
        entries = {entry.name: entry for entry in weights.manifest.tensors}
        end = 0
        for entry in entries.values():
            assert entry.offset >= end
            end = entry.offset + entry.nbytes
        assert weights.path.stat().st_size == weights.manifest.total_bytes == end
        for matrix in format_.recipe.all_stored(layout.matrices):
            shape, kind = (len(matrix.rows), len(matrix.part.columns)), matrix.kind
            if kind.bits is None:
                assert entries.pop(f"{matrix.name}.weight").shape == shape
            else:
                codes, scales = packed_shapes(shape, kind.bits, kind.column_multiple)
                assert entries.pop(f"{matrix.name}.codes").shape == codes
                assert entries.pop(f"{matrix.name}.scales").shape == scales
                block = values(weights, f"{matrix.name}.scales")
                assert (block > 0).all()
        for vector in layout.vectors:
            (length,) = entries.pop(vector.name).shape
            assert length == sum(len(part) for _role, part in vector.parts)
            assert np.isfinite(values(weights, vector.name)).all()
        if layout.embedding:
            assert entries.pop("embedding").shape == (len(layout.embedding), model.hidden_size)
        for number, rows in enumerate(layout.token_tables):
            columns = model.token_inputs * len(layout.layers)
            assert entries.pop(f"token_table.{number}").shape == (len(rows), columns)
        assert not entries
    assert list((tmp_path / "new").iterdir()) == []


def test_a_sample_has_few_tokens(tmp_path: Path) -> None:
    """Where layers have inputs of each token, a table of them lies on disk beside the weights."""
    model = replace(shared_keys_spec(), vocab_size=1 << 24)
    layout = weights_sample(model, INT4, 4 << 20).layout("whole", INT4)
    with written_weights(layout, INT4, tmp_path) as weights:
        assert weights.manifest.total_bytes < 1 << 20


def test_tables_of_tokens_take_nothing_of_the_disk(tmp_path: Path) -> None:
    """Those of a whole vocabulary are gigabytes, and a peer has promised nothing for them."""
    model = replace(shared_keys_spec(), vocab_size=1 << 14)
    plan = make_plan(model, "solo", model="m")
    layout = shard_layout(model, plan, stage=0, rank=0)
    with written_weights(layout, INT4, tmp_path) as weights:
        tables = [each for each in weights.manifest.tensors if each.name.startswith("token_table")]
        tables_bytes = sum(each.nbytes for each in tables)
        taken_bytes, counted_bytes = (
            weights.path.stat().st_blocks * 512,
            written_bytes(layout, INT4),
        )
        assert counted_bytes <= taken_bytes < counted_bytes + tables_bytes // 2
        assert not values(weights, tables[0].name).any()


def values(weights: ShardWeights, name: str) -> np.ndarray:
    entry = next(each for each in weights.manifest.tensors if each.name == name)
    content = weights.path.read_bytes()[entry.offset : entry.offset + entry.nbytes]
    return np.frombuffer(content, entry.dtype)


def small_layout() -> ShardLayout:
    return weights_sample(SPEC, INT4, 4 << 20).layout("whole", INT4)


def test_a_failure_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), written_weights(small_layout(), INT4, tmp_path):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_measurement_left_is_removed_after_a_while(tmp_path: Path) -> None:
    old, young = tmp_path / "measuring-old", tmp_path / "measuring-young"
    for folder in (old, young):
        folder.mkdir()
        (folder / "weights").write_bytes(b"x")
    other = tmp_path / "shards"
    other.mkdir()
    long_ago_s = time.time() - 100_000
    os.utime(old, (long_ago_s, long_ago_s))
    os.utime(other, (long_ago_s, long_ago_s))
    with written_weights(small_layout(), INT4, tmp_path):
        assert not old.exists()
        assert young.exists()
        assert other.exists()


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(random_weights, "_write", full)
    with (
        pytest.raises(CapacityError, match="has no room for the weights of a measurement"),
        written_weights(small_layout(), INT4, tmp_path),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


class Samples:
    """Gives out what would be measured, one after the other."""

    def __init__(self, *samples: list[float]) -> None:
        self._left = list(samples)

    def __call__(self) -> list[float]:
        return self._left.pop(0)

    @property
    def left(self) -> int:
        return len(self._left)


@pytest.mark.parametrize(
    ("samples", "medians", "spread", "is_unsteady"),
    [
        ([[1.0, 2.0], [1.08, 2.0]], (1.04, 2.0), 0.08, False),
        ([[1.0, 2.0], [1.2, 2.0], [1.0, 2.0]], (1.0, 2.0), 0.2, False),
        ([[1.0, 2.0], [1.5, 2.0], [1.1, 2.1]], (1.1, 2.0), 0.5, False),
        ([[1.0], [1.5], [1.4]], (1.4,), 0.5, False),
        ([[1.0], [2.0], [4.0]], (2.0,), 3.0, True),
        ([[1.0, 1.0], [1.0, 2.0], [1.0, 0.5]], (1.0, 1.0), 3.0, True),
    ],
    ids=str,
)
def test_samples_that_disagree_need_a_third(
    samples: list[list[float]], medians: tuple[float, ...], spread: float, is_unsteady: bool
) -> None:
    measure = Samples(*samples)
    found, apart, unsteady = agreed(measure(), measure)
    assert measure.left == 0
    assert found == pytest.approx(medians)
    assert apart == pytest.approx(spread)
    assert unsteady is is_unsteady


def test_a_spread_is_of_most_times_over_the_median() -> None:
    assert spread_of([2.0]) == (1.0, 1.0)
    assert spread_of([1.0, 2.0, 2.0, 2.0, 2.0, 4.0]) == (1.0, 1.0)
    low, high = spread_of([float(each) for each in range(1, 102)])
    assert low == pytest.approx(21 / 51)
    assert high == pytest.approx(81 / 51)


EXPERTS = Experts(num_experts=48, top_k=4, columns=768, activation="silu", renormalized=True)
SPARSE = LayerSpec(
    mixer=plain_layer(num_heads=24, num_kv_heads=4, head_size=64).mixer, feed_forward=EXPERTS
)
GROUPED = replace(SPARSE, feed_forward=replace(EXPERTS, groups=4, chosen_groups=2))


@pytest.mark.parametrize("budget_mib", [12, 24, 64, 512])
def test_experts_are_measured_with_those_of_one_token(budget_mib: int) -> None:
    model = spec_of([SPARSE] * 9, hidden_size=1536, vocab_size=40)
    sample = expert_sample(model, INT4, budget_mib << 20)
    assert sample is not None
    assert 2 * sample.nbytes("whole", INT4) < budget_mib << 20
    assert sample.num_experts == sample.num_routed == 4 * sample.num_layers
    block = sample.spec.layer(1).feed_forward
    assert isinstance(block, Experts)
    assert (block.columns == 768) == (sample.num_layers > 1) == (budget_mib > 24)
    assert sample.limits.cached_tokens < CONTEXT_TOKENS * REQUESTS
    unlike = spec_of([GROUPED] * 4, hidden_size=1536, vocab_size=40)
    all_of_them = expert_sample(unlike, INT4, 512 << 20)
    assert all_of_them is not None
    assert all_of_them.num_experts == 12 * all_of_them.num_routed


def test_experts_are_not_measured_where_there_are_none_or_is_no_room() -> None:
    model = spec_of([SPARSE] * 4, hidden_size=1536, vocab_size=40)
    assert expert_sample(model, INT4, 1 << 20) is None
    assert expert_sample(spec(), INT4, PLENTY) is None


def test_a_layer_whose_experts_are_too_large_has_those_of_one_token_and_is_counted_with_all() -> (
    None
):
    model = spec_of([SPARSE] * 4, hidden_size=1536, vocab_size=40)
    sample = weights_sample(model, INT4, 48 << 20)
    assert sample.is_narrowed
    assert sample.counted is not None
    measured, counted = (each.layer(1).feed_forward for each in (sample.spec, sample.counted))
    assert isinstance(measured, Experts)
    assert isinstance(counted, Experts)
    assert (measured.num_experts, counted.num_experts) == (4, 48)
    assert measured.columns == counted.columns > 128
    matrices = sample.layout("whole", INT4).matrices
    assert {each.name.split(".")[3] for each in matrices if ".experts." in each.name} == set("0123")
    few = replace(sample, counted=None)
    assert sum(few.nbytes(width, INT4) for width in ("whole", "half", "narrow")) < 48 << 20
    expert_bytes = (sample.nbytes("whole", INT4) - few.nbytes("whole", INT4)) / 44
    column_bytes = model_facts(model, INT4, name="m", embedding_itemsize=4).kinds[0]
    of_columns = column_bytes.expert_column_bytes * measured.columns
    assert expert_bytes == pytest.approx(of_columns, rel=1e-3), "and a row of the router"
    unlike = spec_of([GROUPED] * 4, hidden_size=1536, vocab_size=40)
    all_of_them = weights_sample(unlike, INT4, 48 << 20).spec.layer(1).feed_forward
    assert isinstance(all_of_them, Experts)
    assert all_of_them.num_experts == 48
