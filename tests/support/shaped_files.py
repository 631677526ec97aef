"""Models with random weights and sizes of published ones, but fewer layers and a small vocabulary.

For benches: `python -m tests.support.shaped_files gemma3 FOLDER` writes a checkpoint, and beside it
a GGUF file in Q4_0, but for `glm-flash`: that architecture is read from folders alone.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

from tests.support.gguf_files import Type, write_gguf

_VOCABULARY = 16_000
_SHARED = {
    "vocab_size": _VOCABULARY,
    "max_position_embeddings": 40_960,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"

SHAPES: dict[str, tuple[str, Mapping[str, Any]]] = {
    "dense": (
        "llama",
        {
            "num_hidden_layers": 2, "hidden_size": 1024, "intermediate_size": 2816,
            "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64,
        },
    ),
    "gemma3": (  # 6 of the 18 layers of the 270M
        "gemma3_text",
        {
            "num_hidden_layers": 6, "hidden_size": 640, "intermediate_size": 2048,
            "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
            "sliding_window": 512, "layer_types": [_SLIDING] * 5 + [_FULL],
            "rope_parameters": {
                _SLIDING: {"rope_type": "default", "rope_theta": 1e4},
                _FULL: {"rope_type": "linear", "rope_theta": 1e6, "factor": 1.0},
            },
        },
    ),
    "gpt-oss": (  # heads and window of the 20B; a quarter of its columns and experts
        "gpt_oss",
        {
            "num_hidden_layers": 2, "hidden_size": 768, "intermediate_size": 768,
            "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
            "num_local_experts": 8, "num_experts_per_tok": 4, "sliding_window": 128,
            "layer_types": [_SLIDING, _FULL],
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 150_000.0, "factor": 32.0, "truncate": False,
                "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
    ),
    "glm-flash": (  # 2 of the 47 layers of GLM-4.7-Flash; an eighth of its experts
        "glm4_moe_lite",
        {
            "num_hidden_layers": 2, "hidden_size": 2048, "intermediate_size": 4096,
            "num_attention_heads": 20, "num_key_value_heads": 20, "q_lora_rank": 768,
            "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 192,
            "v_head_dim": 256, "n_routed_experts": 8, "num_experts_per_tok": 4,
            "moe_intermediate_size": 1536, "n_shared_experts": 1, "first_k_dense_replace": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    ),
    "qwen3.5": (  # 4 of the 24 layers of the 0.8B
        "qwen3_5_text",
        {
            "num_hidden_layers": 4, "hidden_size": 1024, "intermediate_size": 3584,
            "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
            "linear_num_key_heads": 16, "linear_num_value_heads": 16,
            "linear_key_head_dim": 128, "linear_value_head_dim": 128,
            "layer_types": [_LINEAR] * 3 + [_FULL],
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
                "mrope_section": [11, 11, 10], "mrope_interleaved": True,
            },
        },
    ),
}  # fmt: skip
"""By name: a model_type and sizes."""


def make(name: str, folder: Path) -> None:
    """Write the checkpoint and the file of one of SHAPES."""
    model_type, sizes = SHAPES[name]
    source = folder / name
    config = transformers.AutoConfig.for_model(model_type, **{**_SHARED, **sizes})
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(source)
    _write_tokenizer(source)
    if name != "glm-flash":
        write_gguf(folder / f"{name}-q4_0.gguf", source, kind=Type.Q4_0)


def _write_tokenizer(folder: Path) -> None:
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    names += [f"t{index}" for index in range(_VOCABULARY - len(names))]
    model = tokenizers.models.BPE(
        vocab={name: number for number, name in enumerate(names)},
        merges=[], unk_token="<unk>", byte_fallback=True,
    )  # fmt: skip
    tokenizers.Tokenizer(model).save(str(folder / "tokenizer.json"))


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]))
