"""The weights of a Llama's GGUF file in float32, as a Hugging Face checkpoint or as another GGUF.

python gguf_floats.py checkpoint GGUF FOLDER
python gguf_floats.py gguf GGUF TARGET           (both run by themselves where gguf is installed)

So programs with formats of their own can begin with the same numbers. Byte-level BPE only.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
WHOLE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
CONTROL_TOKEN = 3
"""GGUF's type of a token that no text has."""


def tensor_name(name: str) -> str:
    """What Hugging Face calls a GGUF file's tensor."""
    parts = name.removesuffix(".weight").split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{NAMES[parts[2]]}.weight"
    return f"{WHOLE[parts[0]]}.weight"


def pairs_apart(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Rows of a query or key matrix [heads × size, columns] in Hugging Face's order.

    GGUF keeps the two rows that are rotated together side by side, Hugging Face half a head apart.
    """
    rows, columns = weight.shape
    paired = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(rows, columns)


def floats(reader: Any) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """(GGUF's name, weights) of every tensor, one after the other."""
    from gguf.quants import dequantize

    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        yield tensor.name, np.ascontiguousarray(values, np.float32)


def metadata(reader: Any) -> dict[str, Any]:
    return {name: field.contents() for name, field in reader.fields.items()}


def config(known: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    """config.json for a file's metadata."""
    heads, hidden = known["llama.attention.head_count"], known["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "head_dim": hidden // heads,
        "intermediate_size": known["llama.feed_forward_length"],
        "num_attention_heads": heads,
        "num_key_value_heads": known["llama.attention.head_count_kv"],
        "num_hidden_layers": known["llama.block_count"],
        "max_position_embeddings": known["llama.context_length"],
        # 1e-5 as the nearest float32 comes back as 9.99999975e-06.
        "rms_norm_eps": float(f"{known['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": known["llama.rope.freq_base"],
        "vocab_size": known["llama.vocab_size"],
        "bos_token_id": known["tokenizer.ggml.bos_token_id"],
        "eos_token_id": known["tokenizer.ggml.eos_token_id"],
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float32",
    }


def tokenizer(known: dict[str, Any]) -> dict[str, Any]:
    """tokenizer.json: byte-level BPE that takes each digit alone, as SmolLM's does."""
    if (known["tokenizer.ggml.model"], known["tokenizer.ggml.pre"]) != ("gpt2", "smollm"):
        raise SystemExit("only the tokenizer of SmolLM is known here")
    tokens = known["tokenizer.ggml.tokens"]
    bytes_of_text = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": id,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for id, (token, kind) in enumerate(
                zip(tokens, known["tokenizer.ggml.token_type"], strict=True)
            )
            if kind == CONTROL_TOKEN
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {**bytes_of_text, "use_regex": True},
            ],
        },
        "post_processor": None,
        "decoder": {**bytes_of_text, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: id for id, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in known["tokenizer.ggml.merges"]],
        },
    }


def write_checkpoint(source: Path, folder: Path) -> None:
    """A folder that transformers and Edge read."""
    import gguf

    reader = gguf.GGUFReader(source)
    known = metadata(reader)
    heads = {
        "attn_q": known["llama.attention.head_count"],
        "attn_k": known["llama.attention.head_count_kv"],
    }
    folder.mkdir(parents=True, exist_ok=True)
    weights: dict[str, NDArray[np.float32]] = {}
    for name, values in floats(reader):
        part = name.split(".")[-2]
        kept = pairs_apart(values, heads[part]) if part in heads else values
        weights[tensor_name(name)] = kept
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, values in weights.items():
        begin, end = end, end + values.nbytes
        header[name] = {
            "dtype": "F32",
            "shape": list(values.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for values in weights.values():
            file.write(values.data)
    tied = "lm_head.weight" not in weights
    tokens = known["tokenizer.ggml.tokens"]
    named = {
        "tokenizer_class": "GPT2Tokenizer",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "bos_token": tokens[known["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[known["tokenizer.ggml.eos_token_id"]],
        "chat_template": known["tokenizer.chat_template"],
    }
    for file_name, content in (
        ("config.json", config(known, tied=tied)),
        ("tokenizer.json", tokenizer(known)),
        ("tokenizer_config.json", named),
    ):
        (folder / file_name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def write_gguf(source: Path, target: Path) -> None:
    """The same file with all weights as floats, for llama.cpp to quantise."""
    import gguf

    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "llama")
    left_out = {"general.architecture", "general.file_type", "general.quantization_version"}
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in left_out:
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, inner)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for name, values in floats(reader):
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    write = {"checkpoint": write_checkpoint, "gguf": write_gguf}[sys.argv[1]]
    write(Path(sys.argv[2]), Path(sys.argv[3]))
