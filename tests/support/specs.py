"""Models that are sizes alone: a `ModelSpec` without a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edge.models.attention import Attention
from edge.models.families import llama_tensor_name
from edge.models.gated_mlp import GatedMlp
from edge.models.rotary import Rotary
from edge.models.spec import LayerSpec, ModelSpec, by_kind, tensor_shapes

_OF_MODEL = (
    "family",
    "hidden_size",
    "vocab_size",
    "context_tokens",
    "norm_epsilon",
    "tied_embeddings",
    "embedding_scale",
    "logit_scale",
    "logit_soft_cap",
)


def plain_layer(**facts: Any) -> LayerSpec:
    """Small attention and a small gated MLP, but for these facts; the rest is made to fit."""
    values: dict[str, Any] = {
        "num_heads": 3,
        "num_kv_heads": 3,
        "head_size": 8,
        "window": None,
        "qkv_bias": False,
        "output_bias": False,
        "query_key_norm": False,
        "ffn_columns": 16,
        "activation": "silu",
        "mlp_bias": False,
        **facts,
    }
    frequencies = values.pop("inverse_frequencies", (1.0,) * (values["head_size"] // 2))
    values.setdefault("rotary", Rotary(inverse_frequencies=frequencies))
    feed_forward = GatedMlp(
        columns=values.pop("ffn_columns"),
        activation=values.pop("activation"),
        bias=values.pop("mlp_bias"),
        has_norm=values.pop("mlp_has_norm", True),
        has_post_norm=values.pop("mlp_has_post_norm", False),
    )
    return LayerSpec(mixer=Attention(**values), feed_forward=feed_forward)


def spec_of(layers: list[LayerSpec], **facts: Any) -> ModelSpec:
    """A small model of these layers."""
    values: dict[str, Any] = {
        "family": "llama",
        "hidden_size": 24,
        "vocab_size": 11,
        "context_tokens": 1000,
        "norm_epsilon": 1e-6,
        "tied_embeddings": False,
        **facts,
    }
    return ModelSpec(**values, **by_kind(layers))


def plain_spec(**facts: Any) -> ModelSpec:
    """A small Llama, but for these facts; layers are alike but for their `windows`."""
    of_model = {name: facts.pop(name) for name in _OF_MODEL if name in facts}
    num_layers = facts.pop("num_layers", 4)
    windows = facts.pop("windows", (None,) * num_layers)
    return spec_of([plain_layer(**{**facts, "window": each}) for each in windows], **of_model)


def shared_keys_spec() -> ModelSpec:
    """Eight layers with inputs of tokens; of the last four, two attend to the keys of layer 2 and
    two to those of 3, whose heads are larger."""
    heads = {"num_heads": 6, "num_kv_heads": 3}
    blocks = [plain_layer(window=7, **heads), plain_layer(head_size=16, **heads)]
    layers: list[LayerSpec] = []
    for number in range(8):
        mixer, block = blocks[number % 2].mixer, blocks[number % 2].feed_forward
        assert isinstance(mixer, Attention)
        assert isinstance(block, GatedMlp)
        if number >= 4:
            mixer = replace(mixer, keys_of=2 + number % 2)
        layers.append(LayerSpec(mixer=mixer, feed_forward=replace(block, token_inputs=6)))
    return spec_of(layers)


def changed(spec: ModelSpec, **facts: Any) -> ModelSpec:
    """The model with other facts, as `plain_spec` takes them."""
    known = vars(shape(spec))
    if facts.get("head_size", known["head_size"]) != known["head_size"]:
        del known["rotary"]
    if "inverse_frequencies" in facts:
        known.pop("rotary", None)
    if "num_layers" in facts:
        known["windows"] = (None,) * facts["num_layers"]
    return plain_spec(**{**known, **facts})


def shape(spec: ModelSpec) -> SimpleNamespace:
    """The facts that `plain_spec` takes, of a model whose layers are alike but for windows."""
    first, feed_forward = spec.attention, spec.kinds[0].feed_forward
    mixer = {
        each.name: getattr(first, each.name) for each in fields(first) if each.name != "window"
    }
    return SimpleNamespace(
        **{name: getattr(spec, name) for name in _OF_MODEL},
        **mixer,
        ffn_columns=feed_forward.columns,
        activation=feed_forward.activation,
        mlp_bias=feed_forward.bias,
        mlp_has_norm=feed_forward.has_norm,
        mlp_has_post_norm=feed_forward.has_post_norm,
        windows=tuple(each.window for each in spec.attentions.values()),
    )


@contextmanager
def few_random_bytes() -> Iterator[None]:
    """Without the megabytes of random numbers that those of large shards begin with."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("edge.profiling.random_weights._BLOCK_BYTES", 1 << 18)
        yield


def made_up_weights(spec: ModelSpec) -> dict[str, np.ndarray[Any, Any]]:
    """Random weights of a size that keeps activations near one, by Llama's tensor names."""
    random = np.random.default_rng(0)
    weights = {}
    for role, size in tensor_shapes(spec).items():
        values = random.standard_normal(size, np.float32)
        weights[llama_tensor_name(role)] = values / np.float32(size[-1] ** 0.5 if size[1:] else 3)
    return weights
