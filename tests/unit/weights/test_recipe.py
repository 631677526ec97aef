"""Which matrix of a model is in what: rules, what becomes of fused matrices, and what it weighs."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest

from edge.memory.model_sizes import model_facts
from edge.models.spec import FILE_BLOCKS, ModelSpec, graded, tensor_shapes
from edge.weights.block_matrices import Blocks
from edge.weights.file_blocks import FileBlocks
from edge.weights.float_matrices import Floats
from edge.weights.format_sizes import bytes_per_weight, counted_matrices, in_words
from edge.weights.formats import WeightFormat, weight_format
from edge.weights.layout import shard_layout
from edge.weights.recipe import Recipe, Rule
from tests.support.plans import make_plan
from tests.support.specs import plain_spec

LLAMA = plain_spec(
    num_layers=4,
    hidden_size=64,
    ffn_columns=96,
    vocab_size=128,
    num_heads=4,
    num_kv_heads=2,
    head_size=16,
)
FOUR, EIGHT, FLOATS = Blocks(4, 32), Blocks(8, 64), Floats()
RECIPE = Recipe(
    FOUR,
    (
        Rule("down.weight", FLOATS, grade=2),
        Rule("down.weight", EIGHT, grade=1),
        Rule("value.weight", EIGHT),
        Rule("head", FLOATS),
    ),
)


def test_the_first_rule_for_a_role_and_a_grade_counts() -> None:
    assert RECIPE.kind("layers.7.down.weight", 0) == FOUR
    assert RECIPE.kind("layers.7.down.weight", 1) == EIGHT
    assert RECIPE.kind("down.weight", 2) == FLOATS
    assert RECIPE.kind("layers.0.value.weight", 5) == EIGHT
    assert RECIPE.kind("head", 0) == FLOATS
    assert RECIPE.kind("layers.0.query.weight", 0) == FOUR
    assert RECIPE.kinds == (FOUR, FLOATS, EIGHT)


def test_columns_are_cut_where_every_kind_of_the_matrix_can_be() -> None:
    assert RECIPE.column_multiple({"down.weight"}) == 64
    assert RECIPE.column_multiple({"value.weight"}) == 64
    assert RECIPE.column_multiple({"head"}) == 1
    assert RECIPE.column_multiple(set()) == 1
    assert RECIPE.column_multiple({"output.weight"}) == 32
    assert Recipe(FLOATS).column_multiple({"down.weight"}) == 1


def test_a_fused_matrix_is_stored_by_runs_of_one_kind() -> None:
    layout = shard_layout(LLAMA, make_plan(LLAMA, "solo", model="m"), stage=0, rank=0)
    queries_and_keys, values = RECIPE.stored(layout.matrix("layers.0.qkv"))
    assert (queries_and_keys.name, queries_and_keys.kind) == ("layers.0.qkv.0", FOUR)
    assert (values.name, values.kind) == ("layers.0.qkv.1", EIGHT)
    assert queries_and_keys.rows.stop == values.rows.start
    assert values.rows.stop == layout.matrix("layers.0.qkv").num_rows
    (gate_up,) = RECIPE.stored(layout.matrix("layers.0.gate_up"))
    assert gate_up.part == layout.matrix("layers.0.gate_up")


def test_layers_of_a_grade_are_a_kind_of_their_own() -> None:
    spec = graded(LLAMA, [index % 2 for index in range(LLAMA.num_layers)])
    assert len(spec.kinds) == 2
    assert ModelSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    chosen = WeightFormat(name="made up", recipe=RECIPE, accuracy="fast")
    plain, finer = model_facts(spec, chosen, name="m", embedding_itemsize=4).kinds
    hidden = LLAMA.hidden_size
    difference = hidden * (EIGHT.packed_bytes_per_weight - FOUR.packed_bytes_per_weight)
    assert finer.ffn_column_bytes - plain.ffn_column_bytes == round(difference)
    assert replace(finer, ffn_column_bytes=plain.ffn_column_bytes) == plain


def test_int4_keeps_8_bits_where_models_are_sensitive() -> None:
    spec = replace(LLAMA, layers=(0,) * 24)
    chosen = weight_format(spec, "int4", packs_blocks=True)
    finer = [n for n, layer in enumerate(map(chosen.graded(spec).layer, range(24))) if layer.grade]
    assert finer == [0, 1, 2, 5, 8, 11, 14, 17, 20, 21, 22, 23]
    in_8_bits: Counter[str] = Counter()
    for matrix, count in counted_matrices(spec, chosen):
        if matrix.kind.bits == 8:
            in_8_bits[matrix.name.split(".", 2)[-1]] += count
    assert in_8_bits == {
        "head": 1, "key.weight": 24, "value.weight": 24, "down.weight": len(finer)
    }  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "in_2_bits", "bits"),
    [
        ("int3", {"gate.weight", "up.weight"}, (3.3, 3.6)),
        ("int2", {"gate.weight", "up.weight", "down.weight", "query.weight"}, (2.6, 2.9)),
    ],
)
def test_int3_and_int2_have_2_bits_where_most_weights_are(
    dtype: str, in_2_bits: set[str], bits: tuple[float, float]
) -> None:
    spec = plain_spec(
        num_layers=32,
        hidden_size=4096,
        ffn_columns=14336,
        vocab_size=32000,
        num_heads=32,
        num_kv_heads=8,
        head_size=128,
    )
    chosen = weight_format(spec, dtype, packs_blocks=True)
    found = {
        matrix.name.split(".", 2)[-1]: matrix.kind for matrix, _ in counted_matrices(spec, chosen)
    }
    assert {role for role, kind in found.items() if kind.bits == 2} == in_2_bits
    assert {kind.bits for kind in found.values()} == {2, 4}
    assert found["up.weight"] == Blocks(2, 128, zero_points=True)
    assert found["down.weight"].column_multiple == 64  # devices share these columns out
    assert found["head"] == found["value.weight"] == Blocks(4, 32, zero_points=True)
    assert bits[0] < 8 * bytes_per_weight(spec, chosen) < bits[1]
    in_blocks = weight_format(spec, dtype)
    graded = in_blocks.graded(spec)
    types = {
        (matrix.name.split(".", 2)[-1], matrix.kind)
        for matrix, _ in counted_matrices(graded, in_blocks)
    }
    usual, sensitive = {"int3": ("Q3_K", "Q4_K"), "int2": ("Q2_K", "Q3_K")}[dtype]
    assert types == {
        *((name, FileBlocks(usual)) for name in ("up.weight", "gate.weight", "down.weight")),
        *((name, FileBlocks(usual)) for name in ("query.weight", "output.weight")),
        ("down.weight", FileBlocks(sensitive)),
        *((name, FileBlocks("Q4_K")) for name in ("key.weight", "value.weight", "head")),
    }
    assert bits[1] < 8 * bytes_per_weight(graded, in_blocks) < bits[1] + 0.7
    given = weight_format(spec, dtype, 16).recipe.kinds
    assert set(given) == {
        Blocks(4, 16, zero_points=True),
        Blocks(2, 32, zero_points=True),
    }  # no kernel has smaller ones


@pytest.mark.parametrize(
    ("dtype", "bits", "words"),
    [
        ("float32", 32, "float32: float32, 32 bits a weight with their scales"),
        ("int8", 9, "int8: 8 bits in blocks of 32, 9 bits a weight with their scales"),
        ("int4-pure", 5, "int4-pure: 4 bits in blocks of 32, 5 bits a weight with their scales"),
    ],
)
def test_what_a_format_weighs(dtype: str, bits: float, words: str) -> None:
    chosen = weight_format(LLAMA, dtype)
    assert 8 * bytes_per_weight(LLAMA, chosen) == bits
    assert in_words(LLAMA, chosen) == words


def test_int4_in_blocks_of_files_takes_as_many_bits_as_q4_k_m() -> None:
    wide = plain_spec(
        num_layers=22, hidden_size=2048, ffn_columns=5632, vocab_size=32000,
        num_heads=32, num_kv_heads=4, head_size=64,
    )  # fmt: skip
    chosen = weight_format(wide, "int4")
    assert chosen.needs == (FILE_BLOCKS,)
    assert 8 * bytes_per_weight(wide, chosen) < 4.85
    assert chosen.recipe.column_multiple({"down.weight"}) == 256
    words = in_words(wide, chosen)
    assert all(f"blocks of {each}" in words for each in ("Q4_K", "Q5_K", "Q6_K"))
    narrow = plain_spec(num_layers=8, hidden_size=64, ffn_columns=128, vocab_size=64)
    kinds = weight_format(narrow, "int4").recipe.kinds
    assert {kind.column_multiple for kind in kinds} == {32}
    packed = weight_format(wide, "int4", packs_blocks=True)
    assert packed.needs == ()
    assert packed.recipe == weight_format(wide, "int4", packed.recipe.usual.column_multiple).recipe


def test_a_mixed_format_is_told_by_its_parts() -> None:
    chosen = weight_format(LLAMA, "int4", packs_blocks=True)
    shapes = {role: shape for role, shape in tensor_shapes(LLAMA).items() if len(shape) == 2}
    assert sum(
        count * len(matrix.rows) * len(matrix.part.columns)
        for matrix, count in counted_matrices(LLAMA, chosen)
    ) == sum(rows * columns for role, (rows, columns) in shapes.items() if role != "embedding")
    assert 5 < 8 * bytes_per_weight(LLAMA, chosen) < 9
    told = in_words(LLAMA, chosen)
    assert "% 4 bits in blocks of 32" in told
    assert "% 8 bits in blocks of" in told
