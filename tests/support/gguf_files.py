"""GGUF files made by their own package, of checkpoints and tokenizers as folders have them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from tests.support.checkpoints import TinyCheckpoint
from tests.support.gguf_tensors import in_file_order, put_together, stacked, taken_apart, unstacked

Type: Any = gguf.GGMLQuantizationType

_TENSORS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
    "post_self_attn_layernorm": "post_attention_norm",
    "post_mlp_layernorm": "post_ffw_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "self_attn.sinks": "attn_sinks.weight",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w2": "ffn_down",
    "feed_forward.w3": "ffn_up",
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "feed_forward.gate": "ffn_gate_inp",
    "feed_forward.expert_bias": "exp_probs_b.bias",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "layer_scalar": "layer_output_scale.weight",
    "router.proj": "ffn_gate_inp",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "conv.in_proj": "shortconv.in_proj",
    "conv.conv": "shortconv.conv",
    "conv.out_proj": "shortconv.out_proj",
    **{f"mlp.experts.{part}_proj": f"ffn_{part}_exps" for part in ("gate", "up", "down")},
    **{
        f"{block}.experts.{theirs}": f"ffn_{part}_exps"
        for block in ("block_sparse_moe", "feed_forward")
        for theirs, part in (("w1", "gate"), ("w3", "up"), ("w2", "down"))
    },
    **{
        f"mlp.shared_expert{end}.{part}_proj": f"ffn_{part}_shexp"
        for end in ("", "s")
        for part in ("gate", "up", "down")
    },
}
_WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "model.embedding_norm.weight": "token_embd_norm.weight",
    "lm_head.weight": "output.weight",
    "model.embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
    "model.per_layer_model_projection.weight": "per_layer_model_proj.weight",
    "model.per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
}

_TABLES = ("token_embd.weight", "per_layer_token_embd.weight")

_FLOATS = ("ffn_gate_inp", "shortconv.conv", "ssm_conv1d")
"""Matrices that files never hold as codes."""

_ARCHITECTURES = {
    "mistral": "llama",
    "mixtral": "llama",
    "ministral3": "mistral3",
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "olmo3": "olmo2",
    "gpt_oss": "gpt-oss",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "glm4_moe": "glm4moe",
    "lfm2_moe": "lfm2moe",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_next": "qwen3next",
    "qwen2_5_vl_text": "qwen2vl",
    "qwen3_vl_text": "qwen3vl",
}

_FURTHER = {
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "num_dense_layers": "leading_dense_block_count",
    "routed_scaling_factor": "expert_weights_scale",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "conv_L_cache": "shortconv.l_cache",
    "top_k_experts": "expert_used_count",
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
"""Keys of some architectures, by fields of a config.json."""

_TURNING = ("llama", "granite", "mistral3", "smollm3")
_WINDOWED = (
    "mistral",
    "mixtral",
    "gemma2",
    "gemma3_text",
    "gemma4_text",
    "gpt_oss",
    "olmo3",
    "phi3",
)

_HALVES: Mapping[int, tuple[int, ...]] = {
    Type.Q2_K: (80, 82),
    Type.Q3_K: (108,),
    Type.Q4_K: (0, 2),
    Type.Q5_K: (0, 2),
    Type.Q6_K: (208,),
    Type.IQ4_NL: (0,),
    Type.IQ4_XS: (0,),
    **dict.fromkeys((Type.IQ2_XXS, Type.IQ2_XS, Type.IQ2_S, Type.IQ3_XXS, Type.IQ3_S), (0,)),
}
"""Where a block has float16 numbers, of types that the package does not make."""


def gguf_name(name: str, *, has_post_norms: bool = False) -> str:
    """Of a tensor that a folder calls `name`; `has_post_norms`: of gemma and olmo, and of those
    that call the norm before the feed-forward block as theirs behind attention."""
    if name in _WHOLE:
        return _WHOLE[name]
    _model, _layers, index, *part, suffix = name.split(".")
    if whole := _TENSORS.get(".".join([*part, suffix])):
        return f"blk.{index}.{whole}"
    local = _TENSORS[".".join(part)]
    if has_post_norms and local == "ffn_norm" and part[0].startswith("post"):
        local = "post_attention_norm"
    return f"blk.{index}.{local}.{suffix}"


def raw_blocks(values: NDArray[np.float32], kind: int, seed: int = 0) -> NDArray[np.uint8]:
    """Bytes [rows, bytes] of a matrix in this type, or of stacked ones.

    Rounded where the package does that; else random codes, with scales that make weights of about
    the same size.
    """
    if kind not in (*_HALVES, Type.NVFP4):
        return np.asarray(gguf.quants.quantize(values, kind)).view(np.uint8)
    if values.ndim == 3:
        rows = raw_blocks(values.reshape(-1, values.shape[-1]), kind, seed)
        return rows.reshape(*values.shape[:-1], -1)
    size, nbytes = gguf.GGML_QUANT_SIZES[kind]
    chance = np.random.default_rng(seed)
    shape = (len(values), values.shape[1] // size, nbytes)
    blocks = chance.integers(0, 256, shape, dtype=np.uint8)
    if kind == Type.NVFP4:  # whose codes are of weights of about 3
        scales = chance.uniform(0.5, 1.5, (*shape[:2], 4)) * np.std(values) / 3
        blocks[..., :4] = gguf.quants.NVFP4.fp32_to_ue4m3(scales.astype(np.float32))
        return blocks.reshape(len(values), -1)
    for at in _HALVES[kind]:
        scales = chance.uniform(0.5, 1.5, (*shape[:2], 1)).astype(np.float16)
        blocks[..., at : at + 2] = scales.view(np.uint8)
    flat = blocks.reshape(len(values), -1)
    found = np.std(gguf.quants.dequantize(flat, kind))
    for at in _HALVES[kind]:
        half = np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)
        scaled = (half.astype(np.float32) * (np.std(values) / found)).astype(np.float16)
        blocks[..., at : at + 2] = scaled.view(np.uint8)
    return blocks.reshape(len(values), -1)


def turned(rows: NDArray[Any], head_size: int) -> NDArray[Any]:
    """Rows of query or key as llama.cpp wants them: the halves of each head in turn."""
    halves = rows.reshape(-1, 2, head_size // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def turned_back(rows: NDArray[Any], head_size: int) -> NDArray[Any]:
    pairs = rows.reshape(-1, head_size // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def write_gguf(
    path: Path,
    folder: Path,
    *,
    kind: int | Callable[[str], int] = Type.F32,
    embedding: int | None = None,
    leave_out: Sequence[str] = (),
    change: Mapping[str, Any] | None = None,
    tokenizer_settings: Mapping[str, Any] | None = None,
) -> TinyCheckpoint:
    """The checkpoint in `folder` as GGUF; matrices as `kind` (also by the file's name for each), if
    their rows are whole blocks.

    `leave_out`: tensors by the file's names. `change`: metadata (numbers and texts) over what the
    checkpoint has; None leaves one out. `tokenizer_settings`: keys after "tokenizer.". Returns a
    checkpoint, beside `path`, of the weights that the file stands for, as the package reads them.
    """
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    if config["model_type"] != "gemma4_text":  # whose experts lie as in files
        weights = taken_apart(stacked(weights), config)
    name = _ARCHITECTURES.get(config["model_type"], config["model_type"])
    is_gemma = name.startswith("gemma")
    is_delta = name in ("qwen35", "qwen35moe", "qwen3next")
    has_post_norms = is_gemma or is_delta or name in ("olmo2", "gpt-oss", "glm4moe")
    writer = gguf.GGUFWriter(path, name)
    head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    for key, value in (_metadata(config, name, head_size) | dict(change or {})).items():
        _add(writer, key, value)
    if (folder / "tokenizer.json").is_file():
        tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        model = json.loads(tokenizer.to_str())
        if model["model"].get("byte_fallback"):
            add_sentence_pieces(writer, tokenizer, tokenizer_settings)
        elif _merges(model):  # without any, no file can hold it
            add_byte_level(writer, tokenizer, pre="gpt-2", settings=tokenizer_settings)
    meant: dict[str, NDArray[np.float32]] = {}
    for place, (source, values) in enumerate(weights.items()):
        own = gguf_name(source, has_post_norms=has_post_norms)
        turns = name in _TURNING and (".q_proj." in source or ".k_proj." in source)
        stored = turned(values, head_size) if turns else values
        if "conv1d" in own or "shortconv.conv" in own or "inp_shexp" in own:
            stored = stored.squeeze()
        is_offset = (is_gemma or is_delta) and name != "gemma4" and own.endswith("norm.weight")
        is_offset = is_offset and "ssm_norm" not in own
        if is_offset:
            stored = values + np.float32(1)
        if own.endswith("ssm_a"):
            stored = -np.exp(stored)
        if name in ("qwen35", "qwen35moe"):
            stored = in_file_order(source, stored, config)
        usual = kind(own) if callable(kind) else kind
        is_matrix = values.ndim > 1 and own.endswith("weight")
        wanted = usual if is_matrix and not any(each in own for each in _FLOATS) else Type.F32
        if own == "token_embd.weight":
            wanted = embedding or usual
        if values.shape[-1] % gguf.GGML_QUANT_SIZES[wanted][0]:
            wanted = Type.F32
        raw = raw_blocks(stored, wanted, seed=place)
        if own not in leave_out:
            shape = gguf.quant_shape_from_byte_shape(raw.shape, wanted)
            assert tuple(shape) == stored.shape
            writer.add_tensor(own, raw, raw_dtype=wanted)
        back = np.asarray(gguf.quants.dequantize(raw, wanted), np.float32).reshape(values.shape)
        if own in _TABLES and gguf.GGML_QUANT_SIZES[wanted][0] > 1:
            back = back.astype(np.float16).astype(np.float32)  # as such tables are read
        if is_offset:
            back = values
        if name in ("qwen35", "qwen35moe"):
            back = in_file_order(source, back, config, back=True)
        if own.endswith("ssm_a"):
            back = np.log(-back)
        meant[source] = turned_back(back, head_size) if turns else back
    rope = config.get("rope_parameters") or {}
    for kind_of_context in ("short", "long"):
        if (factors := rope.get(f"{kind_of_context}_factor")) is not None:
            writer.add_tensor(
                f"rope_factors_{kind_of_context}.weight", np.asarray(factors, np.float32)
            )
    if name == "gemma4":
        own = rope["full_attention"]["partial_rotary_factor"]
        pairs = _of_gemma4(config, rope["sliding_attention"])["attention.key_length"] // 2
        turned_pairs = round(pairs * own)
        factors = [1.0] * turned_pairs + [1e30] * (pairs - turned_pairs)
        writer.add_tensor("rope_freqs.weight", np.asarray(factors, np.float32))
    if rope.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(rope, head_size))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    reference = path.with_name(f"{path.stem}-meant")
    reference.mkdir()
    (reference / "config.json").write_text(json.dumps(config))
    if name != "gemma4":
        meant = unstacked(meant, in_turn=name == "gpt-oss")
    if name == "qwen3next":
        meant = put_together(meant, config)
    save_file(meant, reference / "model.safetensors", metadata={"format": "pt"})
    return TinyCheckpoint(reference)


def llama3_factors(rope: Mapping[str, Any], head_size: int) -> NDArray[np.float32]:
    """What converters write for Llama 3's scaling of rotary frequencies: divisors."""
    factors = []
    context = rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    for exponent in range(0, head_size, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (exponent / head_size)
        if wavelength < context / high:
            factors.append(1.0)
        elif wavelength > context / low:
            factors.append(rope["factor"])
        else:
            smooth = (context / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)


def add_byte_level(
    writer: Any,
    tokenizer: tokenizers.Tokenizer,
    *,
    pre: str | None,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """A byte-level tokenizer as converters write it; `settings` after `tokenizer.`."""
    serialized = json.loads(tokenizer.to_str())
    tokens, types = _tokens(serialized)
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in _merges(serialized)]
    writer.add_token_merges(merges)
    for key, value in (settings or {}).items():
        _add(writer, f"tokenizer.{key}", value)


def add_sentence_pieces(
    writer: Any, tokenizer: tokenizers.Tokenizer, settings: Mapping[str, Any] | None = None
) -> None:
    """A byte-fallback tokenizer as converters write SentencePiece models: scores, no merges."""
    serialized = json.loads(tokenizer.to_str())
    tokens, types = _tokens(serialized)
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(_merges(serialized)):
        ranks.setdefault("".join(pair), rank)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_scores([-float(ranks.get(token, 10_000)) for token in tokens])
    for key, value in (settings or {}).items():
        _add(writer, f"tokenizer.{key}", value)


def add_gemma4(
    writer: Any, tokenizer: tokenizers.Tokenizer, settings: Mapping[str, Any] | None = None
) -> None:
    """Byte fallback as converters write it for Gemma 4: with its merges."""
    add_byte_level(writer, tokenizer, pre=None, settings=settings)
    _add(writer, "tokenizer.ggml.model", "gemma4")


def _merges(serialized: Mapping[str, Any]) -> Sequence[Any]:
    found: Sequence[Any] = serialized["model"]["merges"]
    return found


def _tokens(serialized: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    vocabulary = dict(serialized["model"]["vocab"])
    added = {token["content"]: token for token in serialized["added_tokens"]}
    vocabulary |= {content: token["id"] for content, token in added.items()}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    types = []
    for token in tokens:
        if token in added:
            types.append(3 if added[token]["special"] else 4)
        else:
            types.append(6 if token.startswith("<0x") and len(token) == 6 else 1)
    if types[0] == 3 and tokens[0] == "<unk>":
        types[0] = 2
    return tokens, types


def _metadata(config: Mapping[str, Any], name: str, head_size: int) -> dict[str, Any]:
    rope = config.get("rope_parameters") or {}
    turned = round(head_size * rope.get("partial_rotary_factor", 1.0))
    local = rope.get("sliding_attention", {})
    rope = rope.get("full_attention", rope)
    found = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config.get("intermediate_size"),
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": _kv_heads(config),
        "attention.key_length": head_size,
        "attention.value_length": head_size,
        "attention.layer_norm_rms_epsilon": config.get("norm_eps", config.get("rms_norm_eps")),
        "rope.dimension_count": turned,
        "rope.freq_base": rope.get("rope_theta", 10000.0),
        "vocab_size": config["vocab_size"],
    }
    found |= {key: config[field] for field, key in _FURTHER.items() if config.get(field)}
    if config["model_type"] == "gpt_oss":
        found["expert_feed_forward_length"] = config["intermediate_size"]
    if config["model_type"] == "glm4_moe":
        found["expert_weights_norm"], found["expert_gating_func"] = config["norm_topk_prob"], 2
    if config["model_type"] == "lfm2_moe":
        found["expert_gating_func"] = 2
    if config["model_type"] == "gemma3_text":
        found["rope.freq_base_swa"] = local["rope_theta"]
        found["rope.scaling.type"], found["rope.scaling.factor"] = "linear", rope["factor"]
    if config["model_type"] == "gemma4_text":
        found |= _of_gemma4(config, local)
    if rope.get("rope_type") == "yarn":
        found["rope.scaling.type"], found["rope.scaling.factor"] = "yarn", rope["factor"]
        trained = rope["original_max_position_embeddings"]
        found["rope.scaling.original_context_length"] = trained
        found["rope.scaling.yarn_beta_fast"] = rope["beta_fast"]
        found["rope.scaling.yarn_log_multiplier"] = rope["mscale_all_dim"]
    if config["model_type"] == "ministral3":
        found["attention.temperature_scale"] = rope["llama_4_scaling_beta"]
    if rope.get("rope_type") == "longrope":
        trained = config["original_max_position_embeddings"]
        factor = config["max_position_embeddings"] / trained
        found["rope.scaling.original_context_length"] = trained
        found["rope.scaling.attn_factor"] = math.sqrt(1 + math.log(factor) / math.log(trained))
    if config["model_type"] in _WINDOWED and config.get("sliding_window"):
        found["attention.sliding_window"] = config["sliding_window"]
    if (sections := rope.get("mrope_section")) is not None:
        found["rope.dimension_sections"] = [*sections, 0]
    if "linear_attention" in config.get("layer_types", ()):
        found["full_attention_interval"] = config["layer_types"].index("full_attention") + 1
        values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
        found["ssm.inner_size"] = values
    return {f"{name}.{key}": value for key, value in found.items() if value is not None}


def _of_gemma4(config: Mapping[str, Any], local: Mapping[str, Any]) -> dict[str, Any]:
    """Heads of layers that see all tokens are others."""
    count, shared = config["num_hidden_layers"], config["num_kv_shared_layers"]
    whole = config.get("per_layer_config", {})
    full = next(
        (each for each in whole.values() if "head_dim" in each),
        {"head_dim": config.get("global_head_dim")},
    )
    is_local = [each == "sliding_attention" for each in config["layer_types"]]
    heads, columns = config["num_key_value_heads"], config["intermediate_size"]
    found = {
        "attention.key_length": full["head_dim"],
        "attention.value_length": full["head_dim"],
        "attention.key_length_swa": config["head_dim"],
        "attention.value_length_swa": config["head_dim"],
        "rope.dimension_count": full["head_dim"],
        "rope.dimension_count_swa": config["head_dim"],
        "rope.freq_base_swa": local["rope_theta"],
        "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "attention.sliding_window_pattern": is_local,
    }
    if config["use_double_wide_mlp"]:
        found["feed_forward_length"] = [columns] * (count - shared) + [2 * columns] * shared
    if (others := full.get("num_key_value_heads")) is not None:
        found["attention.head_count_kv"] = [heads if each else others for each in is_local]
    return found


def _kv_heads(config: Mapping[str, Any]) -> Any:
    """Of all layers, or of each, where some have none."""
    heads = config["num_key_value_heads"]
    if "conv" not in config.get("layer_types", ()):
        return heads
    return [heads * (each != "conv") for each in config["layer_types"]]


def _add(writer: Any, key: str, value: Any) -> None:
    kinds = gguf.GGUFValueType
    kind = {bool: kinds.BOOL, int: kinds.UINT32, float: kinds.FLOAT32, str: kinds.STRING}
    writer.kv_data[0].pop(key, None)
    if isinstance(value, list):
        writer.add_array(key, value)
    elif value is not None:
        writer.add_key_value(key, value, kind[type(value)])
