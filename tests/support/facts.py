"""Facts of models whose layers are all alike, of devices by a few numbers, and of crowds."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from edge.partition import ComputeRates, CrowdSpec, LayerFacts, ModelFacts

_OF_LAYER = tuple(LayerFacts.__dataclass_fields__)
_OF_MODEL = tuple(set(ModelFacts.__dataclass_fields__) - {"kinds", "layers"})


def plain_facts(*, num_layers: int, **facts: Any) -> ModelFacts:
    """A model of so many layers, with these facts of itself and of each of them."""
    layer = LayerFacts(**{name: facts.pop(name) for name in _OF_LAYER if name in facts})
    return ModelFacts(kinds=(layer,), layers=(0,) * num_layers, **facts)


def llama_facts(
    num_layers: int, hidden: int, columns: int, heads: int, kv_heads: int, vocab: int, *, bits: int
) -> ModelFacts:
    """Of Llama's shape, whose weights take so many bits but those of the embedding, of 16."""
    head_size = hidden // heads
    head_bytes = 2 * head_size * hidden * bits // 8
    return plain_facts(
        name="llama",
        num_layers=num_layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        ffn_columns=columns,
        vocab_size=vocab,
        tied_embeddings=False,
        column_multiple=32,
        query_head_bytes=head_bytes,
        kv_head_bytes=head_bytes,
        ffn_column_bytes=3 * hidden * bits // 8,
        layer_bytes=8 * hidden,
        embedding_row_bytes=2 * hidden,
        head_row_bytes=hidden * bits // 8,
        kv_bytes_per_token=8 * head_size,
    )


def plain_rates(
    rows: tuple[int, ...], seconds_per_byte: tuple[float, ...], *, shared: float = 1.0, **times: Any
) -> ComputeRates:
    """A device whose slices take as long as whole matrices, and `shared` times as long beside
    others of its host. What is not among `times` takes none."""
    none = (0.0,) * len(rows)
    usual = {
        **dict.fromkeys(("attention_slice_s", "feed_forward_slice_s", "attention_s"), none),
        **dict.fromkeys(("run_s", "jitter", "sample_s", "step_s"), 0.0),
    }
    return ComputeRates(
        rows=rows,
        seconds_per_byte=seconds_per_byte,
        shared_seconds_per_byte=tuple(shared * each for each in seconds_per_byte),
        slice_seconds_per_byte=seconds_per_byte,
        **{**usual, **times},
    )


DECADES = (1, 4, 32, 256)
"""Rows at which made-up devices are measured."""


def usual_rates(bytes_per_s: float, **times: Any) -> ComputeRates:
    """At `DECADES`, as CPUs slow down with more rows."""
    alone = tuple(factor / bytes_per_s for factor in (1.0, 1.3, 5.0, 35.0))
    return plain_rates(DECADES, alone, sample_s=0.1e-3, step_s=0.1e-3, **times)


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
