"""Facts of models whose layers are all alike."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from edge.partition import LayerFacts, ModelFacts

_OF_LAYER = tuple(LayerFacts.__dataclass_fields__)
_OF_MODEL = tuple(set(ModelFacts.__dataclass_fields__) - {"kinds", "layers"})


def plain_facts(*, num_layers: int, **facts: Any) -> ModelFacts:
    """A model of so many layers, with these facts of itself and of each of them."""
    layer = LayerFacts(**{name: facts.pop(name) for name in _OF_LAYER if name in facts})
    return ModelFacts(kinds=(layer,), layers=(0,) * num_layers, **facts)


def facts_of(model: ModelFacts) -> SimpleNamespace:
    """What `plain_facts` takes."""
    (layer,) = model.kinds
    return SimpleNamespace(
        num_layers=model.num_layers,
        **{name: getattr(layer, name) for name in _OF_LAYER},
        **{name: getattr(model, name) for name in _OF_MODEL},
    )


def changed_facts(model: ModelFacts, **facts: Any) -> ModelFacts:
    return plain_facts(**{**vars(facts_of(model)), **facts})
