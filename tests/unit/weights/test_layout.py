"""Which slices a shard holds: every weight exactly once over a stage, fused in a known order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

from edge.kernels.kv_cache.cache_size import cache_head_size
from edge.memory.model_sizes import model_facts
from edge.memory.step_memory import cache_token_bytes
from edge.models.attention import Attention
from edge.models.parts import MatrixSlice
from edge.models.spec import ModelSpec, tensor_shapes
from edge.partition import Plan, Shard, Stage, Workload, kv_heads
from edge.weights.layout import ShardLayout, shard_layout
from tests.support.formats import uniform_format
from tests.support.plans import LAYOUTS, make_plan
from tests.support.specs import changed, plain_spec, shape, shared_keys_spec

SPEC = plain_spec(
    hidden_size=20,
    num_heads=6,
    head_size=4,
    ffn_columns=15,
    context_tokens=32,
    inverse_frequencies=(1.0, 0.1),
    qkv_bias=True,
    output_bias=True,
    mlp_bias=True,
    query_key_norm=True,
)
KV_ROLES = ("key", "value")
NORMS = ("attention_norm", "mlp_norm", "query_norm", "key_norm", "final_norm")

Cell = tuple[str, int, int]
"""(role, row, column); a vector has only column 0."""


def stage_layouts(plan: Plan, stage: int, spec: ModelSpec = SPEC) -> list[ShardLayout]:
    count = len(plan.stages[stage].shards)
    return [shard_layout(spec, plan, stage=stage, rank=rank) for rank in range(count)]


def held(layout: ShardLayout) -> Iterator[Cell]:
    """Every element of every weight that the shard reads, as often as it reads it."""
    for matrix in layout.matrices:
        for role, rows in matrix.parts:
            yield from ((role, row, column) for row in rows for column in matrix.columns)
    for vector in layout.vectors:
        for role, elements in vector.parts:
            yield from ((role, element, 0) for element in elements)
    yield from (
        ("embedding", row, column) for row in layout.embedding for column in range(SPEC.hidden_size)
    )


def short_role(role: str) -> str:
    """`query` for layers.3.query.weight and `attention_norm` for layers.3.attention_norm."""
    return role.split(".")[2] if role.startswith("layers.") else role


def all_cells(plan: Plan) -> Counter[Cell]:
    return Counter(
        cell
        for stage in range(len(plan.stages))
        for layout in stage_layouts(plan, stage)
        for cell in held(layout)
    )


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_weight_is_held_exactly_once(name: str) -> None:
    """But for norms, which every shard that computes with them holds, and replicated KV heads."""
    cells = all_cells(make_plan(SPEC, name, model="m"))
    everything: set[Cell] = set()
    for role, size in tensor_shapes(SPEC).items():
        columns = size[1] if len(size) == 2 else 1
        everything.update(
            (role, row, column) for row in range(size[0]) for column in range(columns)
        )
    assert set(cells) == everything
    repeated = {short_role(role) for (role, _row, _column), count in cells.items() if count > 1}
    assert repeated <= {*NORMS, *KV_ROLES}


def test_without_a_split_nothing_is_held_twice() -> None:
    for name in ("solo", "pipeline_2", "pipeline_3"):
        assert set(all_cells(make_plan(SPEC, name, model="m")).values()) == {1}


@pytest.mark.parametrize("name", ["tensor_2", "tensor_3", "tensor_5", "mixed_2x2"])
def test_kv_heads_go_along_with_the_query_heads_that_read_them(name: str) -> None:
    plan = make_plan(SPEC, name, model="m")
    for number, stage in enumerate(plan.stages):
        for layout, shard in zip(stage_layouts(plan, number), stage.slices, strict=True):
            (mixer,) = {each.mixer for each in layout.local}
            assert mixer is None or isinstance(mixer, Attention)
            assert (mixer.num_heads if mixer else 0) == len(shard.heads)
            whole = shape(SPEC)
            local = kv_heads(shard.heads, whole.num_heads, whole.num_kv_heads)
            assert (mixer.num_kv_heads if mixer else 0) == len(local)
            for index, head in enumerate(shard.heads):
                own = local[index * len(local) // len(shard.heads)]
                assert own == head // (whole.num_heads // whole.num_kv_heads)


def test_the_plans_of_the_tests_reach_the_hard_cases() -> None:
    """Shards without heads, columns or vocabulary; heads that straddle KV groups; more shards than
    KV heads."""
    shards = [
        shard
        for name in ("tensor_3", "tensor_5")
        for shard in make_plan(SPEC, name, model="m").stages[0].slices
    ]
    assert any(not shard.heads for shard in shards)
    assert any(not shard.ffn_columns for shard in shards)
    assert any(not shard.vocab for shard in shards)
    group = shape(SPEC).num_heads // shape(SPEC).num_kv_heads
    assert any(shard.heads.start % group for shard in shards if shard.heads)
    assert len(LAYOUTS["tensor_5"][0][1].heads) > shape(SPEC).num_kv_heads


def test_query_then_keys_then_values_in_one_matrix() -> None:
    """Heads 1..5 of 6 straddle the groups of two, so each comes with a KV head of its own."""
    layout = one_shard(heads=range(1, 5))
    mixer = layout.local[0].mixer
    assert isinstance(mixer, Attention)
    assert mixer.num_kv_heads == 4
    rows = [range(0, 4), range(4, 8), range(4, 8), range(8, 12)]
    expected = (
        ("layers.0.query.weight", range(4, 20)),
        *(("layers.0.key.weight", each) for each in rows),
        *(("layers.0.value.weight", each) for each in rows),
    )
    qkv = layout.matrix("layers.0.qkv")
    assert qkv.parts == expected
    assert qkv.columns == range(SPEC.hidden_size)
    assert qkv.num_rows == (4 + 2 * 4) * shape(SPEC).head_size
    bias = next(vector for vector in layout.vectors if vector.name == "layers.0.qkv.bias")
    assert bias.parts == tuple((role.replace("weight", "bias"), r) for role, r in expected)


def test_consumers_are_cut_by_columns() -> None:
    layout = one_shard(heads=range(1, 5), ffn_columns=range(3, 9))
    output, down = layout.matrix("layers.0.output"), layout.matrix("layers.0.down")
    assert output == MatrixSlice(
        name="layers.0.output",
        parts=(("layers.0.output.weight", range(SPEC.hidden_size)),),
        columns=range(4, 20),
    )
    assert (down.columns, down.num_rows) == (range(3, 9), SPEC.hidden_size)
    assert layout.matrix("layers.0.gate_up").parts == (
        ("layers.0.gate.weight", range(3, 9)),
        ("layers.0.up.weight", range(3, 9)),
    )


def one_shard(*, heads: range, ffn_columns: range = range(15)) -> ShardLayout:
    """The layout of a shard in the middle of a stage; what lies beside it does not matter."""
    first = Shard(
        device="a",
        heads=range(heads.start),
        ffn_columns=range(ffn_columns.start),
        vocab=range(SPEC.vocab_size),
    )
    this = Shard(device="b", heads=heads, ffn_columns=ffn_columns, vocab=range(11, 11))
    last = Shard(
        device="c",
        heads=range(heads.stop, shape(SPEC).num_heads),
        ffn_columns=range(ffn_columns.stop, shape(SPEC).ffn_columns),
        vocab=range(11, 11),
    )
    stage = Stage(layers=range(SPEC.num_layers), shards=(first, this, last))
    return shard_layout(SPEC, Plan(model="m", version=0, stages=(stage,)), stage=0, rank=1)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_bias_after_a_sum_is_added_once_by_a_shard_that_sums(name: str) -> None:
    plan = make_plan(SPEC, name, model="m")
    for number, stage in enumerate(plan.stages):
        for product, needs in (("output", "mixer"), ("down", "feed_forward")):
            for layer in stage.layers:
                adding = [
                    layout
                    for layout in stage_layouts(plan, number)
                    if f"layers.{layer}.{product}.bias" in {v.name for v in layout.vectors}
                ]
                assert len(adding) == 1
                assert getattr(adding[0].layer(layer), needs) is not None


def test_a_shard_holds_no_norm_that_it_does_not_use() -> None:
    without_heads = one_shard(heads=range(2, 2), ffn_columns=range(3, 9))
    names = {vector.name for vector in without_heads.vectors}
    assert "layers.0.attention_norm" not in names
    assert "layers.0.query_norm" not in names
    assert "layers.0.mlp_norm" in names
    assert "final_norm" not in names
    without_columns = one_shard(heads=range(2, 4), ffn_columns=range(5, 5))
    names = {vector.name for vector in without_columns.vectors}
    assert "layers.0.attention_norm" in names
    assert "layers.0.mlp_norm" not in names


def test_only_the_outer_stages_hold_vocabulary() -> None:
    plan = make_plan(SPEC, "pipeline_3", model="m")
    first, middle, last = (stage_layouts(plan, stage)[0] for stage in range(3))
    assert (first.embedding, first.vocab) == (range(11), range(0))
    assert (middle.embedding, middle.vocab) == (range(0), range(0))
    assert (last.embedding, last.vocab) == (range(0), range(11))
    assert (first.is_first_stage, first.is_last_stage, first.is_split) == (True, False, False)
    assert (last.is_first_stage, last.is_last_stage, last.is_split) == (False, True, False)
    assert {m.name for m in last.matrices} - {m.name for m in middle.matrices} >= {"head"}


def test_a_model_without_biases_and_head_norms_has_none() -> None:
    plain = changed(SPEC, qkv_bias=False, output_bias=False, mlp_bias=False, query_key_norm=False)
    plan = make_plan(plain, "tensor_2", model="m")
    names = {v.name for layout in stage_layouts(plan, 0, plain) for v in layout.vectors}
    assert {short_role(name) for name in names} == {"attention_norm", "mlp_norm", "final_norm"}


def test_heads_that_are_normed_together_are_one_unit() -> None:
    """One shard of a stage has them all, and what plans count is what it holds."""
    spec = changed(SPEC, query_key_norm=False, joint_norm=True)
    facts = model_facts(spec, uniform_format("float32"), name="m", embedding_itemsize=4)
    (kind,) = facts.kinds
    mixer = spec.attention
    assert (kind.num_heads, kind.num_kv_heads, kind.heads_per_unit) == (1, 1, mixer.num_heads)
    assert kind.token_bytes == 2 * 4 * mixer.num_kv_heads * cache_head_size(mixer.head_size)
    plan = make_plan(spec, "tensor_3", model="m")
    plan.validate(facts, None)
    layouts = stage_layouts(plan, 0, spec)
    mixers = [layout.layer(0).mixer for layout in layouts]
    assert [each for each in mixers if each is not None] == [mixer]
    (whole,) = (each for each in layouts if each.layer(0).mixer is not None)
    names = ("qkv", "output", "qkv.bias", "query_norm", "key_norm")
    held = sum(
        part.num_rows * len(part.columns)
        for part in whole.matrices
        if part.name in {f"layers.0.{name}" for name in names}
    ) + sum(
        len(elements)
        for part in whole.vectors
        if part.name in {f"layers.0.{name}" for name in names}
        for _role, elements in part.parts
    )
    assert kind.attention_bytes == 4 * held


@pytest.mark.parametrize("name", ["solo", "pipeline_2", "pipeline_3", "tensor_3", "mixed_2x2"])
def test_keys_of_another_layer_are_kept_once_in_a_stage(name: str) -> None:
    """Layers 4 and 6 attend to the keys of 2, 5 and 7 to those of 3. Plans count the same."""
    spec = shared_keys_spec()
    facts = model_facts(spec, uniform_format("float32"), name="m", embedding_itemsize=4)
    plan = make_plan(spec, name, model="m")
    for number, stage in enumerate(plan.stages):
        for rank, layout in enumerate(stage_layouts(plan, number, spec)):
            for layer, cache in zip(layout.layers, layout.cache_layers, strict=True):
                same = [each for each in layout.layers if each >= 2 and each % 2 == layer % 2]
                assert cache == (layer if layer < 2 else same[0])
            workload = Workload(prompt_tokens=10, output_tokens=0)
            use = stage.shards[rank].memory(plan.place(number), facts, workload)
            assert use.kv_bytes == 10 * cache_token_bytes(layout, "float32")
            behind = plan.stages[number + 1].layers.start if number + 1 < len(plan.stages) else 8
            assert layout.kept_behind == {8: (), 6: (2, 3), 4: (2, 3), 2: ()}[behind]


def test_shards_with_other_heads_of_a_layer_keep_its_keys_once_more() -> None:
    spec = shared_keys_spec()
    plan = make_plan(spec, "tensor_2", model="m")
    kind, others = spec.layers[4], []
    for shard, heads in zip(plan.stages[0].slices, (range(5), range(5, 6)), strict=True):
        slices = [shard.slice(number) for number in range(len(spec.kinds))]
        assert slices[kind].heads != heads
        slices[kind] = replace(slices[kind], heads=heads)
        others.append(Shard.of_slices(shard.device, slices, vocab=shard.vocab))
    plan = replace(plan, stages=(replace(plan.stages[0], shards=tuple(others)),))
    facts = model_facts(spec, uniform_format("float32"), name="m", embedding_itemsize=4)
    plan.validate(facts, None)
    for rank, layout in enumerate(stage_layouts(plan, 0, spec)):
        assert layout.cache_layers == (0, 1, 2, 3, 4, 3, 4, 3)
        use = others[rank].memory(plan.place(0), facts, Workload(prompt_tokens=10, output_tokens=0))
        assert use.kv_bytes == 10 * cache_token_bytes(layout, "float32")


def test_whoever_computes_what_layers_have_of_tokens_has_their_tables() -> None:
    """All rows once, in parts that take little memory each; and the whole embedding."""
    spec = shared_keys_spec()
    for name in ("pipeline_2", "tensor_3"):
        plan = make_plan(spec, name, model="m")
        for number, stage in enumerate(plan.stages):
            for layout in stage_layouts(plan, number, spec):
                rows = [row for table in layout.token_tables for row in table]
                assert rows == list(range(spec.vocab_size))
                size = spec.token_inputs
                assert layout.token_columns == range(
                    size * stage.layers.start, size * stage.layers.stop
                )
                assert layout.embedding == range(spec.vocab_size)
                assert not layout.sums_embedding


def test_a_large_table_is_in_parts() -> None:
    spec = replace(shared_keys_spec(), vocab_size=1 << 20)
    (layout,) = stage_layouts(make_plan(spec, "solo", model="m"), 0, spec)
    assert len(layout.token_tables) > 1
    assert all(len(each) * len(layout.token_columns) <= 1 << 24 for each in layout.token_tables)
    assert layout.token_tables[0].start == 0
    assert layout.token_tables[-1].stop == spec.vocab_size
    joints = zip(layout.token_tables, layout.token_tables[1:], strict=False)
    assert all(before.stop == after.start for before, after in joints)


@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_of_positions_are_added_once(name: str) -> None:
    """By the first that has tokens' rows, also where the first shard has none."""
    spec = replace(SPEC, learned_positions=True)
    plan = make_plan(spec, name, model="m")
    holders = [
        layout.embedding
        for number in range(len(plan.stages))
        for layout in stage_layouts(plan, number, spec)
        if any(vector.name == "positions" for vector in layout.vectors)
    ]
    (rows,) = holders
    assert rows.start == 0 < len(rows)
