"""What is known of a model's layers, for planning."""

from __future__ import annotations

from collections import Counter

import pytest

from edge.memory.model_sizes import model_facts
from edge.models.spec import ModelSpec
from tests.support.formats import uniform_format
from tests.support.specs import plain_spec, shared_keys_spec


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
