"""The `mmproj` file of a tiny model that reads pictures, as llama.cpp's converter names tensors."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from tests.support.gguf_files import turned, write_gguf
from tests.support.towers import CLIP

Weights = dict[str, NDArray[Any]]

_SIGLIP = {
    r"embeddings\.patch_embedding": "v.patch_embd",
    r"embeddings\.position_embedding": "v.position_embd",
    r"post_layernorm": "v.post_ln",
    r"encoder\.layers\.(\d+)\.layer_norm(\d)": r"v.blk.\1.ln\2",
    r"encoder\.layers\.(\d+)\.self_attn\.([qkv])_proj": r"v.blk.\1.attn_\2",
    r"encoder\.layers\.(\d+)\.self_attn\.out_proj": r"v.blk.\1.attn_out",
    r"encoder\.layers\.(\d+)\.mlp\.fc1": r"v.blk.\1.ffn_up",
    r"encoder\.layers\.(\d+)\.mlp\.fc2": r"v.blk.\1.ffn_down",
}
_GEMMA4_LAYER = r"model\.vision_tower\.encoder\.layers\.(\d+)\."
_GEMMA4 = {
    r"model\.vision_tower\.patch_embedder\.input_proj": "v.patch_embd",
    r"model\.vision_tower\.patch_embedder\.position_embedding_table": "v.position_embd.weight",
    rf"{_GEMMA4_LAYER}input_layernorm": r"v.blk.\1.ln1",
    rf"{_GEMMA4_LAYER}post_attention_layernorm": r"v.blk.\1.attn_post_norm",
    rf"{_GEMMA4_LAYER}pre_feedforward_layernorm": r"v.blk.\1.ln2",
    rf"{_GEMMA4_LAYER}post_feedforward_layernorm": r"v.blk.\1.ffn_post_norm",
    rf"{_GEMMA4_LAYER}self_attn\.([qkv])_proj(\.linear)?": r"v.blk.\1.attn_\2",
    rf"{_GEMMA4_LAYER}self_attn\.([qk])_norm": r"v.blk.\1.attn_\2_norm",
    rf"{_GEMMA4_LAYER}self_attn\.o_proj(\.linear)?": r"v.blk.\1.attn_out",
    rf"{_GEMMA4_LAYER}mlp\.(\w+)_proj(\.linear)?": r"v.blk.\1.ffn_\2",
    r"model\.vision_tower\.std_bias": "v.std_bias",
    r"model\.vision_tower\.std_scale": "v.std_scale",
    r"model\.embed_vision\.embedding_projection": "mm.input_projection",
}
_KINDS: dict[str, tuple[str, Mapping[str, str]]] = {
    "gemma4": ("gemma4v", _GEMMA4),
    "gemma4_small": ("gemma4v", _GEMMA4),
    "qwen2_5_vl": (
        "qwen2.5vl_merger",
        {
            r"(?:model\.)?visual\.patch_embed\.proj": "v.patch_embd",
            r"(?:model\.)?visual\.blocks\.(\d+)\.norm(\d)": r"v.blk.\1.ln\2",
            r"(?:model\.)?visual\.blocks\.(\d+)\.attn\.qkv": r"v.blk.\1.attn_qkv",
            r"(?:model\.)?visual\.blocks\.(\d+)\.attn\.proj": r"v.blk.\1.attn_out",
            r"(?:model\.)?visual\.blocks\.(\d+)\.mlp\.(\w+)_proj": r"v.blk.\1.ffn_\2",
            r"(?:model\.)?visual\.merger\.ln_q": "v.post_ln",
            r"(?:model\.)?visual\.merger\.mlp\.": "mm.",
        },
    ),
    "smolvlm": (
        "idefics3",
        {
            **{rf"model\.vision_model\.{old}": new for old, new in _SIGLIP.items()},
            r"model\.connector\.modality_projection\.proj": "mm.model.fc",
        },
    ),
    "gemma3": (
        "gemma3",
        {
            **{rf"vision_tower\.(?:vision_model\.)?{old}": new for old, new in _SIGLIP.items()},
            r"multi_modal_projector\.mm_soft_emb_norm": "mm.soft_emb_norm",
            r"multi_modal_projector\.mm_input_projection_weight": "mm.input_projection.weight",
        },
    ),
    "mistral3": (
        "pixtral",
        {
            r"vision_tower\.patch_conv": "v.patch_embd",
            r"vision_tower\.ln_pre": "v.pre_ln",
            r"vision_tower\.transformer\.layers\.(\d+)\.attention_norm": r"v.blk.\1.ln1",
            r"vision_tower\.transformer\.layers\.(\d+)\.ffn_norm": r"v.blk.\1.ln2",
            r"vision_tower\.transformer\.layers\.(\d+)\.attention\.([qkv])_proj": (
                r"v.blk.\1.attn_\2"
            ),
            r"vision_tower\.transformer\.layers\.(\d+)\.attention\.o_proj": r"v.blk.\1.attn_out",
            r"vision_tower\.transformer\.layers\.(\d+)\.feed_forward\.(\w+)_proj": (
                r"v.blk.\1.ffn_\2"
            ),
            r"multi_modal_projector\.norm": "mm.input_norm",
            r"multi_modal_projector\.patch_merger\.merging_layer": "mm.patch_merger",
            r"multi_modal_projector\.linear_(\d)": r"mm.\1",
        },
    ),
    "qwen3_vl": (
        "qwen3vl_merger",
        {
            r"model\.visual\.patch_embed\.proj": "v.patch_embd",
            r"model\.visual\.pos_embed": "v.position_embd",
            r"model\.visual\.blocks\.(\d+)\.norm(\d)": r"v.blk.\1.ln\2",
            r"model\.visual\.blocks\.(\d+)\.attn\.qkv": r"v.blk.\1.attn_qkv",
            r"model\.visual\.blocks\.(\d+)\.attn\.proj": r"v.blk.\1.attn_out",
            r"model\.visual\.blocks\.(\d+)\.mlp\.linear_fc1": r"v.blk.\1.ffn_up",
            r"model\.visual\.blocks\.(\d+)\.mlp\.linear_fc2": r"v.blk.\1.ffn_down",
            r"model\.visual\.merger\.norm": "v.post_ln",
            r"model\.visual\.merger\.linear_fc1": "mm.0",
            r"model\.visual\.merger\.linear_fc2": "mm.2",
            r"model\.visual\.deepstack_merger_list\.(\d+)\.norm": r"v.deepstack.\1.norm",
            r"model\.visual\.deepstack_merger_list\.(\d+)\.linear_fc": r"v.deepstack.\1.fc",
        },
    ),
}
"""(projector type, names by patterns of names) of models in `towers.py`."""

NAMES = tuple(_KINDS)
_KINDS["qwen3_5"] = _KINDS["qwen3_vl"]


def write_mmproj(
    folder: Path, name: str, target: Path, *, swapped: bool = False, **other: Any
) -> None:
    """Write the tower of the model in a folder. swapped: up and down have each other's names, as
    older converters wrote them. other: metadata in place of the right ones."""
    config = json.loads((folder / "config.json").read_text())
    vision, kind = config["vision_config"], _KINDS[name][0]
    heads = vision.get("num_attention_heads", vision.get("num_heads"))
    writer = gguf.GGUFWriter(target, "clip")
    numbers = {
        "projection_dim": config["text_config"]["hidden_size"],
        "embedding_length": vision["hidden_size"],
        "feed_forward_length": vision["intermediate_size"],
        "block_count": vision.get("num_hidden_layers", vision.get("depth")),
        "attention.head_count": heads,
        "image_size": vision.get("image_size", 112),
        "patch_size": vision["patch_size"],
        "projector.scale_factor": config.get("scale_factor", 3),
        "n_wa_pattern": vision.get("fullatt_block_indexes", [0])[0] + 1,
        "window_size": vision.get("window_size", 0),
        "spatial_merge_size": vision.get("spatial_merge_size", 2),
        **other,
    }
    writer.add_string("clip.projector_type", kind)
    writer.add_bool("clip.use_silu" if name == "qwen2_5_vl" else "clip.use_gelu", True)
    for key, value in numbers.items():
        writer.add_uint32(f"clip.vision.{key}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    normalized = CLIP if name in ("mistral3", "qwen2_5_vl") else ([0.5] * 3, [0.5] * 3)
    for key, value in zip(("image_mean", "image_std"), map(list, normalized), strict=True):
        writer.add_array(f"clip.vision.{key}", value)
    if deep := vision.get("deepstack_visual_indexes"):
        flags = [number in deep for number in range(vision["depth"])]
        writer.add_array("clip.vision.is_deepstack_layers", flags)
    for tensor, values in _tensors(folder, name, heads, vision, swapped).items():
        writer.add_tensor(tensor, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_seeing_gguf(folder: Path, name: str, target: Path) -> Path:
    """The model in a folder as a GGUF file with its mmproj file beside it, in the folder `target`.
    Returns the model's file."""
    config = json.loads((folder / "config.json").read_text())
    stored = load_file(folder / "model.safetensors")
    part = {
        re.sub(r"^(?:model\.|language_model\.|text_model\.)+", "model.", each): values
        for each, values in stored.items()
        if not re.search(r"visual|vision|connector|projector", each)
    }
    text = {**config["text_config"], "tie_word_embeddings": "lm_head.weight" not in part}
    texts = target / "text"
    texts.mkdir(parents=True)
    (texts / "config.json").write_text(json.dumps(text))
    save_file(part, texts / "model.safetensors", metadata={"format": "pt"})
    deep = len(config["vision_config"].get("deepstack_visual_indexes") or ())
    change = {"qwen3vl.n_deepstack_layers": deep} if name == "qwen3_vl" else {}
    write_gguf(target / "model.gguf", texts, change=change)
    write_mmproj(folder, name, target / "mmproj-F32.gguf")
    return target / "model.gguf"


def _tensors(
    folder: Path, name: str, heads: int, vision: Mapping[str, Any], swapped: bool
) -> Weights:
    found: Weights = {}
    stored = load_file(folder / "model.safetensors")
    for old, values in stored.items():
        for pattern, new in _KINDS[name][1].items():
            if re.match(rf"{pattern}(?:\d?\.(?:weight|bias|(?:in|out)put_m(?:in|ax)))?$", old):
                found[re.sub(pattern, new, old)] = values
    if name == "gemma3":
        found["mm.soft_emb_norm.weight"] = found["mm.soft_emb_norm.weight"] + np.float32(1)
    if name == "mistral3":
        size = vision["hidden_size"] // heads
        for each in [each for each in found if re.search(r"attn_[qk]\.", each)]:
            found[each] = turned(found[each], size)
    if name.startswith("gemma4"):
        patches, side = found["v.patch_embd.weight"], vision["patch_size"]
        patches = patches.reshape(len(patches), side, side, 3).transpose(0, 3, 1, 2)
        found["v.patch_embd.weight"] = patches
    if name.startswith("qwen"):
        patches = found.pop("v.patch_embd.weight")
        found["v.patch_embd.weight"], found["v.patch_embd.weight.1"] = (
            patches[:, :, 0],
            patches[:, :, 1],
        )
        indexes = vision.get("deepstack_visual_indexes") or ()
        deep = {str(n): str(layer) for n, layer in enumerate(indexes)}
        found = {
            re.sub(r"deepstack\.(\d+)", lambda m: f"deepstack.{deep[m[1]]}", each): values
            for each, values in found.items()
        }
    if swapped:
        other = {"up": "down", "down": "up"}
        found = {
            re.sub(r"ffn_(up|down)", lambda m: f"ffn_{other[m[1]]}", each): values
            for each, values in found.items()
        }
    return {each: np.atleast_1d(values) for each, values in found.items()}
