"""What of a shard's weights a token is multiplied with."""

from __future__ import annotations

from edge.models.experts import Experts
from edge.models.spec import LayerSpec
from edge.weights.block_matrices import Blocks
from edge.weights.float_matrices import Floats
from edge.weights.layout import shard_layout
from edge.weights.recipe import Recipe, Rule
from edge.weights.token_reads import packed_bytes_of_token
from tests.support.plans import make_plan
from tests.support.specs import plain_layer, plain_spec, spec_of


def test_all_matrices_as_kernels_have_them() -> None:
    """In blocks of 32 a weight of 4 bits takes 6: a float scale and a float sum for each block."""
    spec = plain_spec(hidden_size=64, num_heads=6, head_size=16, ffn_columns=96, vocab_size=100)
    layout = shard_layout(spec, make_plan(spec, "solo", model="m"), stage=0, rank=0)
    recipe = Recipe(Blocks(4, 32), (Rule("head", Floats()),))
    head = 100 * 64
    assert packed_bytes_of_token(layout, recipe) == (layout.num_weights - head) * 6 // 8 + 4 * head


def test_of_experts_as_many_as_a_token_goes_through() -> None:
    """The second layer has none."""
    part = Experts(num_experts=5, top_k=2, columns=64, activation="silu", renormalized=True)
    plain = plain_layer(num_heads=2, num_kv_heads=1, head_size=16)
    layers = [LayerSpec(mixer=plain.mixer, feed_forward=part), plain]
    spec = spec_of(layers, hidden_size=64, vocab_size=40)
    layout = shard_layout(spec, make_plan(spec, "solo", model="m"), stage=0, rank=0)
    one = 3 * 64 * 64
    weights = layout.num_weights - 3 * one
    assert packed_bytes_of_token(layout, Recipe(Floats())) == 4 * weights
