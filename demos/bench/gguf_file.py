"""A GGUF file of a checkpoint of Llama's form: runs by itself, where numpy and gguf are installed.

python gguf_file.py CHECKPOINT GGUF [Q4_0 | F16 | F32]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

MATRICES = {
    **{f"attn_{own}": f"self_attn.{own}_proj" for own in "qkv"},
    "attn_output": "self_attn.o_proj",
}
HEADS = {"q": "attention", "k": "key_value"}
DENSE = {f"ffn_{own}": f"mlp.{own}_proj" for own in ("gate", "up", "down")}
EXPERTS = {"ffn_gate_exps": "w1", "ffn_up_exps": "w3", "ffn_down_exps": "w2"}
NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}

FORMS = ("Q4_0", "F16", "F32")
"""Forms that the package has formulas for and shapes are written in. Q4_0 is llama.cpp's 4-bit
grid in blocks of 32."""


def read_words(folder: Path) -> dict[str, np.memmap[Any, Any]]:
    """Every tensor in the checkpoint: words of bfloat16, or float32."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(size))
        for name, entry in header.items():
            if name != "__metadata__":
                kind = {"BF16": np.uint16, "F32": np.float32}[entry["dtype"]]
                offset = 8 + size + entry["data_offsets"][0]
                shape = tuple(entry["shape"])
                found[name] = np.memmap(file, kind, "r", offset=offset, shape=shape)
    return found


def make_gguf(folder: Path, target: Path, form: str = "Q4_0") -> None:
    """Write the checkpoint's weights in this form to `target`."""
    import gguf

    config = json.loads((folder / "config.json").read_text())
    tensors = read_words(folder)
    heads = {f"attn_{own}": config[f"num_{name}_heads"] for own, name in HEADS.items()}
    num_experts = config.get("num_local_experts", 0)
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    if num_experts:
        writer.add_expert_count(num_experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_rope_freq_base(config.get("rope_theta", 10000.0))
    writer.add_vocab_size(config["vocab_size"])
    whole = "ALL" if form == "F32" else "MOSTLY"
    writer.add_file_type(gguf.LlamaFileType[f"{whole}_{form}"])
    add_tokens(writer, config["vocab_size"])

    def read(source: str) -> np.ndarray:
        words = tensors[f"{source}.weight"]
        return words if words.dtype == np.float32 else (words.astype(np.uint32) << 16).view("f4")

    def add(name: str, *sources: str, quantise: bool = True) -> None:
        """Several sources are matrices of experts, which lie in one tensor."""
        values = np.stack([read(each) for each in sources]) if sources[1:] else read(sources[0])
        if count := heads.get(name.rpartition(".")[2]):  # pairs of a position lie side by side
            size = len(values) // count
            values = values.reshape(count, 2, size // 2, -1).swapaxes(1, 2).reshape(values.shape)
        kind = gguf.GGMLQuantizationType[form if quantise else "F32"]
        values = gguf.quants.quantize(values, kind)
        writer.add_tensor(f"{name}.weight", values, raw_dtype=kind)

    add("token_embd", "model.embed_tokens")
    add("output_norm", "model.norm", quantise=False)
    if "lm_head.weight" in tensors:  # else the embedding is the head, too
        add("output", "lm_head")
    for layer in range(config["num_hidden_layers"]):
        block, source = f"blk.{layer}.", f"model.layers.{layer}."
        for ours, theirs in {**MATRICES, **({} if num_experts else DENSE)}.items():
            add(f"{block}{ours}", f"{source}{theirs}")
        if num_experts:
            moe = f"{source}block_sparse_moe."
            add(f"{block}ffn_gate_inp", f"{moe}gate", quantise=False)
            for ours, theirs in EXPERTS.items():
                add(f"{block}{ours}", *(f"{moe}experts.{n}.{theirs}" for n in range(num_experts)))
        for ours, theirs in NORMS.items():
            add(f"{block}{ours}", f"{source}{theirs}", quantise=False)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokens(writer: Any, vocab_size: int) -> None:
    """Every byte is a token."""
    writer.add_tokenizer_model("llama")
    rest = vocab_size - 259
    named = [b"<unk>", b"<s>", b"</s>"] + [f"<0x{byte:02X}>".encode() for byte in range(256)]
    writer.add_token_list(named + [f"t{index}".encode() for index in range(rest)])
    writer.add_token_scores([0.0] * vocab_size)
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * rest)


if __name__ == "__main__":
    make_gguf(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
