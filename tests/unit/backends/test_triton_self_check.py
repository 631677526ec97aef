"""A back end whose operators disagree with the reference is refused before it spoils a reply."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edge.backends.registry import open_backend
from edge.errors import RequestError
from edge.kernels.gated_mlp.reference import Clamp
from edge.models.experts import Experts, SharedExpert
from edge.models.latent_attention import Latent
from edge.models.linear_attention import LinearAttention
from edge.models.plain_mlp import PlainMlp
from edge.models.rotary import Rotary
from edge.models.short_convolution import ShortConvolution
from edge.models.spec import LayerSpec, ModelSpec
from edge.profiling.random_weights import written_weights
from edge.protocol.step import StepLimits
from edge.weights.block_matrices import Blocks
from edge.weights.formats import WeightFormat
from edge.weights.layout import shard_layout
from edge.weights.recipe import Recipe, Rule
from tests.support.formats import uniform_format
from tests.support.halves import SPEC
from tests.support.plans import make_plan
from tests.support.specs import changed, few_random_bytes, plain_layer, shared_keys_spec, spec_of
from tests.support.triton_face import only_interpreted

ONE_LAYER = changed(SPEC, num_layers=1, windows=(None,))
WITH_BIASES = spec_of(
    [
        LayerSpec(
            mixer=plain_layer(norm_bias=True).mixer,
            feed_forward=PlainMlp(columns=16, activation="gelu_tanh", bias=True, norm_bias=True),
        )
    ],
    norm_bias=True,
)
WITH_OTHER_MIXERS = spec_of(
    [
        LayerSpec(mixer=mixer, feed_forward=plain_layer().feed_forward)
        for mixer in (
            ShortConvolution(num_units=2, unit_channels=7, convolution=3, bias=True),
            LinearAttention(
                num_key_heads=1, num_value_heads=2, key_size=5, value_size=3, convolution=4
            ),
            plain_layer(output_gate=True, value_norm=True).mixer,
            plain_layer(
                rotary=Rotary(inverse_frequencies=(1.0, 0.1)),
                num_kv_heads=1,
                latent=Latent(query_rank=5, rank=6, shared_size=4, value_size=7, bias=False),
            ).mixer,
        )
    ]
)
WITH_EXPERTS = spec_of(
    [
        LayerSpec(
            mixer=plain_layer(has_sinks=True).mixer,
            feed_forward=Experts(
                num_experts=5, top_k=2, columns=16, activation="silu", renormalized=True,
                bias=True, clamp=Clamp(limit=1.0, slope=1.5),
            ),
        ),
        LayerSpec(
            mixer=plain_layer(has_sinks=True).mixer,
            feed_forward=Experts(
                num_experts=6, top_k=3, columns=16, activation="silu", renormalized=False,
                scoring="sigmoid", has_correction=True, groups=3, chosen_groups=2,
                shared=SharedExpert(columns=9, is_gated=True),
            ),
        ),
    ]
)  # fmt: skip
LIMITS = StepLimits(context_tokens=16, chunk_tokens=8, requests=2, cached_tokens=16)

TRITON = "edge.backends.triton"


def load(
    folder: Path,
    spec: ModelSpec = ONE_LAYER,
    *,
    dtype: str = "float32",
    kv_dtype: Any = "float32",
    form: WeightFormat | None = None,
) -> None:
    only_interpreted()
    chosen = form or uniform_format(dtype)
    layout = shard_layout(spec, make_plan(spec, "solo", model="m"), stage=0, rank=0)
    with few_random_bytes(), written_weights(layout, chosen, folder) as weights:
        backend = open_backend("triton", threads=1)
        backend.load(spec, layout, weights, chosen, limits=LIMITS, kv_dtype=kv_dtype).close()


def slightly_wrong(results: Any) -> Any:
    """In the last place only."""
    first = results[0] if isinstance(results, tuple) else results
    first.view(-1)[-1] += 0.01 * first.abs().max() + 0.01
    return results


def nowhere(results: Any) -> Any:
    first = results[0] if isinstance(results, tuple) else results
    first.view(-1)[0] = float("nan")
    return results


def another_id(results: Any) -> Any:
    results[1][0, 0] += 1
    return results


def another_expert(results: Any) -> Any:
    results[0][0, 0] = (results[0][0, 0] + 1) % 5
    return results


def another_weight(results: Any) -> Any:
    results[1][0, 0] *= 1.01
    return results


WRONG = [
    (f"{TRITON}.layers.embedding", slightly_wrong, "embedding"),
    (f"{TRITON}.blocks.rms_norm", slightly_wrong, "rms_norm (layers.0.attention_norm)"),
    (f"{TRITON}.blocks.add_rms_norm", slightly_wrong, "add_rms_norm (layers.0.attention_norm)"),
    (
        f"{TRITON}.attention.attention",
        slightly_wrong,
        "rope and attention (layer 0, 5 of 5 tokens)",
    ),
    (f"{TRITON}.gated_mlp.gated", slightly_wrong, "gated_mlp (layers.0.gate_up)"),
    (f"{TRITON}.weights.matmul", slightly_wrong, "matmul (layers.0.qkv, 1 row)"),
    (f"{TRITON}.weights.matmul", nowhere, "errs by nan"),
    ("edge.backends.triton.self_check.top_k", slightly_wrong, "top_k (1 of"),
    ("edge.backends.triton.self_check.top_k", another_id, "top_k (1 of"),
]
WRONG_WITH_BIASES = [
    (f"{TRITON}.blocks.layer_norm", slightly_wrong, "layer_norm (layers.0.attention_norm)"),
    (f"{TRITON}.blocks.add_layer_norm", slightly_wrong, "add_layer_norm (layers.0.attention_norm)"),
    (f"{TRITON}.plain_mlp.activated", slightly_wrong, "activated (layers.0.up)"),
    (f"{TRITON}.weights.matmul", slightly_wrong, "matmul (layers.0.qkv, 1 row)"),
]
WRONG_WITH_OTHER_MIXERS = [
    (
        f"{TRITON}.short_convolution.short_convolution",
        slightly_wrong,
        "short_convolution (layer 0, 5 tokens)",
    ),
    (
        f"{TRITON}.linear_attention.linear_attention",
        slightly_wrong,
        "linear_attention (layer 1, 5 tokens)",
    ),
    (f"{TRITON}.attention.attention", slightly_wrong, "attention (layer 2, 5 of 5 tokens)"),
    (
        f"{TRITON}.latent_attention.latent_attention",
        slightly_wrong,
        "latent attention (layer 3, 5 of 5 tokens)",
    ),
]
WRONG_WITH_EXPERTS = [
    (f"{TRITON}.experts.route", another_expert, "experts (layers.0.router, 1 row) errs"),
    (f"{TRITON}.experts.route", another_weight, "experts (layers.0.router, 1 row) errs"),
    (
        f"{TRITON}.expert_products.expert_product",
        slightly_wrong,
        "matmul of experts (layers.0.experts.0.gate_up and others, 1 row)",
    ),
    (f"{TRITON}.self_check.mix", slightly_wrong, "experts (layers.0.router, 1 row), mixed errs"),
    (f"{TRITON}.experts.gated", slightly_wrong, "gated_mlp (layers.0.experts.0.gate_up)"),
    (f"{TRITON}.weights.matmul", slightly_wrong, "matmul (layers.0.qkv, 1 row)"),
]


@pytest.mark.parametrize(
    ("face", "breaks", "operator", "spec"),
    [
        *((*each, ONE_LAYER) for each in WRONG),
        *((*each, WITH_BIASES) for each in WRONG_WITH_BIASES),
        *((*each, WITH_OTHER_MIXERS) for each in WRONG_WITH_OTHER_MIXERS),
        *((*each, WITH_EXPERTS) for each in WRONG_WITH_EXPERTS),
        (
            f"{TRITON}.token_inputs.token_inputs",
            slightly_wrong,
            "token_inputs (layer 0)",
            shared_keys_spec(),
        ),
    ],
)
def test_the_operator_that_is_wrong_is_named(
    face: str,
    breaks: Callable[[Any], Any],
    operator: str,
    spec: ModelSpec,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    only_interpreted()
    module, _, name = face.rpartition(".")
    right = getattr(__import__(module, fromlist=[name]), name)
    monkeypatch.setattr(face, lambda *values, **named: breaks(right(*values, **named)))
    with pytest.raises(RequestError) as refused:
        load(tmp_path, spec)
    sentence = str(refused.value)
    assert operator in sentence
    assert "CPU, Triton interpreted" in sentence
    assert "--backend ort" in sentence


@pytest.mark.parametrize("rows", [33, 129])
def test_a_kernel_for_many_rows_is_checked_as_well(
    rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_interpreted()
    from edge.backends.triton import weights as triton_weights
    from edge.kernels.matmul_nbits.triton import matmul_nbits as right

    def wrong(x: Any, *values: Any, **named: Any) -> Any:
        result = right(x, *values, **named)
        return slightly_wrong(result) if len(x) >= rows else result

    monkeypatch.setattr(triton_weights, "matmul_nbits", wrong)
    with pytest.raises(RequestError, match=rf"matmul_nbits \(layers.0.qkv, {rows} rows\) errs by"):
        load(tmp_path, dtype="int4")


def test_experts_of_more_rows_are_checked_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_interpreted()
    from edge.backends.triton import expert_products
    from edge.kernels.experts.triton import expert_product as right

    def wrong(*values: Any, sorted_uses: Any, **named: Any) -> Any:
        result = right(*values, sorted_uses=sorted_uses, **named)
        return result if sorted_uses is None else slightly_wrong(result)

    monkeypatch.setattr(expert_products, "expert_product", wrong)
    with pytest.raises(RequestError, match=r"experts.0.gate_up and others, 5 rows\) errs by"):
        load(tmp_path, WITH_EXPERTS)


@pytest.mark.parametrize("spec", [WITH_BIASES, WITH_OTHER_MIXERS, WITH_EXPERTS, shared_keys_spec()])
def test_other_parts_that_agree_are_loaded(spec: ModelSpec, tmp_path: Path) -> None:
    load(tmp_path, spec)


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(Blocks(code_bits=4, block_size=32, order_number=0, zero_points=True)),
        Recipe(
            Blocks(code_bits=4, block_size=32, offsets=True),
            (Rule("up.weight", Blocks(code_bits=8, block_size=16)),),
        ),
    ],
)
def test_experts_of_all_kinds_of_codes_are_loaded(recipe: Recipe, tmp_path: Path) -> None:
    """Also where gates are of another kind than what they are multiplied by."""
    form = replace(uniform_format("int4"), recipe=recipe)
    load(tmp_path, WITH_EXPERTS, form=form)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [("float32", "float32"), ("int4", "int8"), ("int8", "int4")]
)
def test_what_agrees_is_loaded(tmp_path: Path, dtype: str, kv_dtype: str) -> None:
    load(tmp_path, dtype=dtype, kv_dtype=kv_dtype)
