"""Sizes of small checkpoints of every family: what `config.json` says of them, and nothing else.

The sizes divide by nothing, as published models' sometimes do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CONTEXT_TOKENS = 512

SHARED: dict[str, Any] = {
    "max_position_embeddings": CONTEXT_TOKENS,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "rms_norm_eps": 1e-5,
}

Configured = tuple[str, Mapping[str, Any]]
"""A model_type and the configuration."""


def _decoder(
    model_type: str,
    sizes: tuple[int, int, int, int, int],
    *,
    layers: int = 4,
    **more: Any,
) -> Configured:
    """`sizes`: of hidden states, columns, heads, KV heads and the vocabulary."""
    names = (
        *("hidden_size", "intermediate_size"),
        *("num_attention_heads", "num_key_value_heads", "vocab_size"),
    )
    named = dict(zip(names, sizes, strict=True))
    return model_type, {**named, "num_hidden_layers": layers, **more}


def _kinds(letters: str) -> list[str]:
    """The attention of each layer by its first letter: full, sliding or linear."""
    names = {"f": "full_attention", "s": "sliding_attention", "l": "linear_attention"}
    return [names[letter] for letter in letters]


_LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
}

_HALF_ROTATED: dict[str, Any] = {
    "rope_type": "default",
    "rope_theta": 100.0,
    "partial_rotary_factor": 0.5,
}

FAMILIES: Mapping[str, Configured] = {
    "llama": _decoder("llama", (64, 96, 8, 2, 128), head_dim=16, rope_parameters=_LLAMA3_ROPE),
    "llama_with_biases": _decoder(
        "llama", (60, 90, 6, 3, 131), head_dim=20, attention_bias=True, mlp_bias=True
    ),
    "mistral": _decoder("mistral", (72, 101, 6, 2, 157), head_dim=24, sliding_window=8),
    "qwen2": _decoder(
        "qwen2",
        (80, 113, 5, 5, 131),
        use_sliding_window=True,
        sliding_window=6,
        max_window_layers=2,
    ),
    "qwen3": _decoder("qwen3", (66, 90, 6, 1, 131), head_dim=64, tie_word_embeddings=True),
}
"""By name."""

_GEMMA2: dict[str, Any] = {
    "sliding_window": 7,
    "attn_logit_softcapping": 3.0,
    "final_logit_softcapping": 5.0,
}

_GEMMA3: dict[str, Any] = {
    "query_pre_attn_scalar": 50,
    "sliding_window": 7,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}

_GEMMA4: dict[str, Any] = {
    "rms_norm_eps": 1e-2,
    "sliding_window": 7,
    "final_logit_softcapping": 5.0,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1000.0,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}

_CONVOLUTIONS: dict[str, Any] = {
    "norm_eps": 1e-2,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
}

_DELTA: dict[str, Any] = {
    "hidden_size": 66,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 48,
    "attention_bias": True,
    "rms_norm_eps": 1e-2,
    "vocab_size": 131,
    "linear_num_key_heads": 5,
    "linear_num_value_heads": 10,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 20,
    "layer_types": _kinds("llfl"),
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
    },
}
"""Of models most of whose layers are linear attention."""

_LATENT: dict[str, Any] = {
    "hidden_size": 60,
    "intermediate_size": 90,
    "moe_intermediate_size": 37,
    "num_hidden_layers": 4,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "kv_lora_rank": 22,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 14,
    "vocab_size": 131,
    "n_routed_experts": 9,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 1.5,
    "attention_bias": True,
}
"""Of models with latent attention."""

MORE_FAMILIES: Mapping[str, Configured] = {
    "deepseek_v3": (
        "deepseek_v3",
        _LATENT
        | {
            "q_lora_rank": None,
            "v_head_dim": 12,
            "n_shared_experts": 2,
            "n_group": 3,
            "topk_group": 2,
            "first_k_dense_replace": 2,
            "rope_parameters": _YARN | {"mscale_all_dim": 0.7},
        },
    ),
    "gemma2": _decoder(
        "gemma2",
        (60, 90, 6, 3, 131),
        head_dim=20,
        rms_norm_eps=1e-2,
        query_pre_attn_scalar=50,
        **_GEMMA2,
    ),
    "gemma3": _decoder(
        "gemma3_text",
        (66, 101, 6, 2, 157),
        head_dim=32,
        rms_norm_eps=1e-2,
        layer_types=_kinds("ssfs"),
        **_GEMMA3,
    ),
    "gemma4": _decoder(
        "gemma4_text",
        (66, 101, 6, 3, 131),
        num_global_key_value_heads=2,
        attention_k_eq_v=True,
        head_dim=16,
        global_head_dim=32,
        hidden_size_per_layer_input=0,
        layer_types=_kinds("sfsf"),
        **_GEMMA4,
    ),
    "gemma4_small": _decoder(
        "gemma4_text",
        (66, 53, 6, 3, 131),
        layers=8,
        head_dim=16,
        global_head_dim=32,
        hidden_size_per_layer_input=10,
        vocab_size_per_layer_input=131,
        num_kv_shared_layers=4,
        use_double_wide_mlp=True,
        layer_types=_kinds("sfssfssf"),
        **_GEMMA4,
    ),
    "gemma4_moe": _decoder(
        "gemma4_text",
        (60, 67, 6, 3, 131),
        moe_intermediate_size=37,
        head_dim=16,
        global_head_dim=32,
        attention_k_eq_v=True,
        num_global_key_value_heads=2,
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
        tie_word_embeddings=False,
        num_experts=5,
        top_k_experts=2,
        layer_types=_kinds("fssf"),
        **_GEMMA4,
    ),
    "glm4": _decoder("glm4", (60, 90, 6, 3, 131), head_dim=20, rope_parameters=_HALF_ROTATED),
    "glm4_moe": _decoder(
        "glm4_moe",
        (60, 90, 6, 3, 131),
        moe_intermediate_size=37,
        head_dim=20,
        attention_bias=True,
        use_qk_norm=True,
        first_k_dense_replace=2,
        n_routed_experts=9,
        n_shared_experts=2,
        num_experts_per_tok=3,
        n_group=3,
        topk_group=2,
        routed_scaling_factor=1.5,
        rope_parameters=_HALF_ROTATED,
    ),
    "glm4_moe_lite": (
        "glm4_moe_lite",
        _LATENT
        | {
            "q_lora_rank": 34,
            "v_head_dim": 20,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        },
    ),
    "gpt2": (
        "gpt2",
        {
            "n_embd": 60,
            "n_inner": 101,
            "n_layer": 4,
            "n_head": 5,
            "n_positions": CONTEXT_TOKENS,
            "vocab_size": 131,
            "layer_norm_epsilon": 1e-2,
            "scale_attn_by_inverse_layer_idx": True,
        },
    ),
    "gpt_oss": _decoder(
        "gpt_oss",
        (60, 37, 6, 3, 131),
        head_dim=20,
        sliding_window=9,
        num_local_experts=5,
        num_experts_per_tok=2,
        swiglu_alpha=1.3,
        swiglu_limit=0.9,
        rope_parameters=_YARN | {"truncate": False},
    ),
    "granite": _decoder(
        "granite",
        (64, 90, 4, 2, 131),
        rms_norm_eps=1e-2,
        embedding_multiplier=3.0,
        logits_scaling=0.25,
        residual_multiplier=0.22,
        attention_multiplier=0.4,
    ),
    "lfm2": _decoder(
        "lfm2",
        (66, 101, 6, 3, 131),
        head_dim=20,
        conv_bias=True,
        conv_L_cache=4,
        block_multiple_of=7,
        block_ffn_dim_multiplier=1.1,
        tie_word_embeddings=False,
        **_CONVOLUTIONS,
    ),
    "lfm2_moe": _decoder(
        "lfm2_moe",
        (66, 101, 6, 3, 131),
        moe_intermediate_size=37,
        head_dim=20,
        conv_L_cache=3,
        num_dense_layers=1,
        num_experts=7,
        num_experts_per_tok=3,
        routed_scaling_factor=1.3,
        **_CONVOLUTIONS,
    ),
    "ministral3": _decoder(
        "ministral3",
        (72, 101, 6, 2, 157),
        head_dim=24,
        rope_parameters=_YARN | {"llama_4_scaling_beta": 0.0},
    ),
    "mixtral": _decoder(
        "mixtral", (60, 37, 6, 3, 131), sliding_window=9, num_local_experts=5, num_experts_per_tok=2
    ),
    "olmo2": _decoder("olmo2", (60, 90, 6, 3, 131), rms_norm_eps=1e-2),
    "olmo3": _decoder(
        "olmo3",
        (64, 90, 4, 2, 131),
        sliding_window=7,
        rope_parameters={
            "full_attention": _YARN,
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "phi3": _decoder(
        "phi3",
        (64, 90, 4, 2, 131),
        sliding_window=21,
        original_max_position_embeddings=CONTEXT_TOKENS,
    ),
    "phi3_long": _decoder(
        "phi3",
        (60, 90, 3, 3, 131),
        original_max_position_embeddings=16,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 100.0,
            "partial_rotary_factor": 0.6,
            "short_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5],
            "long_factor": [1.0, 2.0, 4.0, 5.0, 9.0, 12.0],
        },
    ),
    "qwen2_moe": _decoder(
        "qwen2_moe",
        (60, 90, 6, 3, 131),
        moe_intermediate_size=37,
        shared_expert_intermediate_size=53,
        num_experts=5,
        num_experts_per_tok=2,
        mlp_only_layers=[2],
        use_sliding_window=True,
        sliding_window=9,
        max_window_layers=3,
    ),
    "qwen3_moe": _decoder(
        "qwen3_moe",
        (66, 90, 6, 2, 131),
        moe_intermediate_size=41,
        head_dim=32,
        num_experts=7,
        num_experts_per_tok=3,
        norm_topk_prob=True,
        mlp_only_layers=[1],
    ),
    "qwen3_5": (
        "qwen3_5_text",
        _DELTA
        | {
            "rope_parameters": _DELTA["rope_parameters"]
            | {"mrope_section": [2, 2, 2], "mrope_interleaved": True},
            "intermediate_size": 90,
        },
    ),
    "qwen3_5_moe": (
        "qwen3_5_moe_text",
        _DELTA
        | {
            "rms_norm_eps": 0.03,
            "moe_intermediate_size": 41,
            "shared_expert_intermediate_size": 60,
            "num_experts": 6,
            "num_experts_per_tok": 2,
        },
    ),
    "qwen3_next": (
        "qwen3_next",
        _DELTA
        | {
            "intermediate_size": 90,
            "moe_intermediate_size": 41,
            "shared_expert_intermediate_size": 29,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "norm_topk_prob": False,
            "mlp_only_layers": [1],
        },
    ),
    "smollm3": _decoder(
        "smollm3",
        (60, 90, 6, 3, 131),
        no_rope_layers=[1, 0, 1, 0],
        use_sliding_window=True,
        sliding_window=9,
        layer_types=_kinds("ffsf"),
    ),
}
"""Others than Llama's shape, likewise."""
_SMALL_EYE = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_QWEN_EYE = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
_SECTIONS = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}

WITH_PICTURES: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "mistral3": (
        "mistral3",
        "ministral3",
        {"vision_config": {"model_type": "pixtral", "head_dim": 8, **_SMALL_EYE}},
    ),
    "gemma3_with_pictures": (
        "gemma3",
        "gemma3",
        {
            "vision_config": {"model_type": "siglip_vision_model", **_SMALL_EYE},
            "mm_tokens_per_image": 4,
        },
    ),
    "smolvlm": ("smolvlm", "llama", {"vision_config": _SMALL_EYE}),
    "qwen3_vl": (
        "qwen3_vl",
        "qwen3",
        {
            "text_config": {"model_type": "qwen3_vl_text", **SHARED, **FAMILIES["qwen3"][1]},
            "vision_config": {**_QWEN_EYE, "out_hidden_size": 66, "deepstack_visual_indexes": []},
        },
    ),
    "qwen2_5_vl": (
        "qwen2_5_vl",
        "qwen2",
        {
            "text_config": {
                "model_type": "qwen2_5_vl_text",
                **SHARED,
                **FAMILIES["qwen2"][1],
                "use_sliding_window": False,
                "rope_parameters": _SECTIONS,
            },
            "vision_config": {**_QWEN_EYE, "out_hidden_size": 80, "fullatt_block_indexes": []},
        },
    ),
    "qwen3_5_with_pictures": (
        "qwen3_5",
        "qwen3_5",
        {"vision_config": {"model_type": "qwen3_5_vision", "out_hidden_size": 66, **_QWEN_EYE}},
    ),
}
"""name → (model_type, the name of its text part above, configuration)."""

LARGER: Mapping[str, Configured] = {
    "larger_llama": _decoder("llama", (256, 704, 8, 2, 509), head_dim=32),
}
"""Wide enough that rounding errors average out as they do in real models."""
WORDY: Mapping[str, Configured] = {
    "many_words": _decoder("llama", (64, 96, 8, 2, 4099), head_dim=16),
}
"""With a vocabulary so large that shards do not send each other all its logits."""
IN_BLOCKS: Mapping[str, Configured] = {
    "llama_in_blocks": _decoder("llama", (256, 512, 8, 2, 131), head_dim=32),
    "qwen2_in_blocks": _decoder("qwen2", (64, 96, 4, 2, 131)),
    "gemma2_in_blocks": _decoder(
        "gemma2", (64, 96, 4, 2, 131), head_dim=32, query_pre_attn_scalar=32, **_GEMMA2
    ),
    "gemma4_in_blocks": _decoder(
        "gemma4_text",
        (64, 96, 4, 2, 131),
        layers=7,
        head_dim=32,
        global_head_dim=64,
        hidden_size_per_layer_input=32,
        vocab_size_per_layer_input=131,
        num_kv_shared_layers=3,
        use_double_wide_mlp=True,
        layer_types=_kinds("sfssfsf"),
        **_GEMMA4,
    ),
    "gemma3_in_blocks": _decoder(
        "gemma3_text",
        (64, 96, 4, 2, 131),
        layers=7,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=7,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    ),
    "phi3_in_blocks": _decoder(
        "phi3",
        (64, 96, 4, 2, 131),
        original_max_position_embeddings=16,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 100.0,
            "partial_rotary_factor": 0.5,
            "short_factor": [1.0, 1.5, 2.0, 2.5],
            "long_factor": [1.0, 2.0, 4.0, 5.0],
        },
    ),
    "qwen3_in_blocks": _decoder(
        "qwen3", (64, 96, 6, 2, 131), head_dim=32, tie_word_embeddings=True
    ),
}
"""Whose rows are whole blocks of the types in GGUF files."""
_DELTA_IN_BLOCKS = _DELTA | {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "attention_bias": False,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "layer_types": _kinds("lflf"),
    "intermediate_size": 96,
}
_DELTA_EXPERTS = _DELTA_IN_BLOCKS | {
    "moe_intermediate_size": 96,
    "shared_expert_intermediate_size": 64,
    "num_experts": 5,
    "num_experts_per_tok": 2,
}

EXPERTS_IN_BLOCKS: Mapping[str, Configured] = {
    "qwen2_moe_in_blocks": _decoder(
        "qwen2_moe",
        (64, 96, 4, 2, 131),
        moe_intermediate_size=256,
        shared_expert_intermediate_size=CONTEXT_TOKENS,
        num_experts=4,
        num_experts_per_tok=2,
    ),
    "gpt_oss_in_blocks": _decoder(
        "gpt_oss",
        (64, 256, 4, 2, 131),
        head_dim=32,
        sliding_window=7,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters=_YARN | {"truncate": False},
    ),
    "lfm2_in_blocks": _decoder(
        "lfm2", (64, 96, 4, 2, 131), block_auto_adjust_ff_dim=False, **_CONVOLUTIONS
    ),
    "lfm2_moe_in_blocks": _decoder(
        "lfm2_moe",
        (64, 96, 4, 2, 131),
        moe_intermediate_size=96,
        num_dense_layers=1,
        num_experts=5,
        num_experts_per_tok=2,
        **_CONVOLUTIONS,
    ),
    "qwen3_5_in_blocks": ("qwen3_5_text", _DELTA_IN_BLOCKS),
    "qwen3_5_moe_in_blocks": ("qwen3_5_moe_text", _DELTA_EXPERTS),
    "qwen3_next_in_blocks": ("qwen3_next", _DELTA_EXPERTS),
    "qwen3_moe_in_blocks": _decoder(
        "qwen3_moe",
        (64, 96, 4, 2, 131),
        moe_intermediate_size=96,
        head_dim=32,
        num_experts=7,
        num_experts_per_tok=3,
        norm_topk_prob=True,
    ),
}
"""Others, with experts, and with states."""

SIZES = {**FAMILIES, **MORE_FAMILIES, **LARGER, **WORDY, **IN_BLOCKS, **EXPERTS_IN_BLOCKS}
"""All of them by name, but those with pictures."""
