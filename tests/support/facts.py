"""Facts of models whose layers are all alike, and of crowds."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from edge.partition import CrowdSpec, LayerFacts, ModelFacts

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


def crowd_of(count: int, sum_s: Sequence[float], **others: Any) -> CrowdSpec:
    """On the host "h", by 1, 2, 3 … rows unless others say so; slower by nothing but its sums."""
    ones = (1.0,) * len(sum_s)
    usual = {"host": "h", "rows": tuple(range(1, len(sum_s) + 1)), "slower": ones, "pace": ones}
    return CrowdSpec(count=count, sum_s=tuple(sum_s), **{**usual, "link": (0.0, 1e9), **others})
