"""What is known of a model's layers, for planning."""

from __future__ import annotations

from collections import Counter

import pytest

from edge.memory.model_sizes import model_facts
from edge.models.experts import Experts, SharedExpert
from edge.models.spec import LayerSpec, ModelSpec
from edge.partition import Plan, Shard, Stage, Workload, memory_use
from edge.weights.layout import shard_layout
from tests.support.formats import uniform_format
from tests.support.specs import plain_layer, plain_spec, shared_keys_spec, spec_of


def test_how_much_is_kept_of_earlier_layers_is_what_each_layer_says() -> None:
    spec = shared_keys_spec()
    facts = model_facts(spec, uniform_format("float32"), name="m", embedding_itemsize=4)
    assert any(facts.kept)
    assert facts.kept == tuple(len(spec.kept(layer)) for layer in range(spec.num_layers))


def test_layers_are_not_looked_at_again_for_each_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of 600 bytes may name 4096, which took 14 s."""
    looks = Counter[int]()
    look = ModelSpec.layer

    def counted(spec: ModelSpec, number: int) -> object:
        looks[number] += 1
        return look(spec, number)

    spec = plain_spec(num_layers=500)
    monkeypatch.setattr(ModelSpec, "layer", counted)
    facts = model_facts(spec, uniform_format("float32"), name="m", embedding_itemsize=4)
    assert facts.kept == ()
    assert max(looks.values()) < 10


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_shard_of_whole_experts_weighs_what_its_layout_says(has_bias: bool) -> None:
    """Uneven numbers of experts, and columns of what else there is. What biases of a product's
    results take is counted for all experts, as every shard may have the most of them."""
    shared = None if has_bias else SharedExpert(columns=24, is_gated=True)
    block = Experts(
        num_experts=7, top_k=2, columns=48, activation="silu", renormalized=True, bias=has_bias,
        shared=shared,
    )  # fmt: skip
    mixer = plain_layer(num_heads=4, num_kv_heads=2, head_size=16).mixer
    spec = spec_of([LayerSpec(mixer=mixer, feed_forward=block)] * 3, hidden_size=64, vocab_size=40)
    facts = model_facts(spec, uniform_format("float32"), name="m", embedding_itemsize=4)
    experts = (
        ((0,), (3,), (6,)),
        tuple(tuple(each for each in range(7) if each != own) for own in (0, 3, 6)),
    )
    parts = (range(2), range(36), range(10)), (range(2, 4), range(36, 48), range(10, 40))
    shards = tuple(
        Shard(device=name, heads=heads, ffn_columns=columns, vocab=vocab, experts=own)
        for name, (heads, columns, vocab), own in zip("ab", parts, experts, strict=True)
    )
    plan = Plan(model="m", version=0, stages=(Stage(layers=range(3), shards=shards),))
    plan.validate(facts, None)
    use = memory_use(plan, facts, Workload(prompt_tokens=1, output_tokens=0))
    for rank, shard in enumerate(shards):
        layout = shard_layout(spec, plan, stage=0, rank=rank)
        held = sum(each.num_rows * len(each.columns) for each in layout.matrices)
        held += sum(each.num_elements for each in layout.vectors)
        held += len(layout.embedding) * spec.hidden_size
        elsewhere = 3 * (7 - shard.whole_experts) * spec.hidden_size * has_bias
        least = 4 * (held - spec.hidden_size)  # the last norm, which is not counted
        assert 0 <= use[shard.device].weight_bytes - least - 4 * elsewhere <= 0.02 * least
