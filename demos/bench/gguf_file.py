"""A GGUF file of a random checkpoint, in Q4_0 (llama.cpp's 4-bit grid in blocks of 32) or F16.

python gguf_file.py CHECKPOINT GGUF [F16]      (runs by itself, where numpy and gguf are installed)
python gguf_file.py FACTS.json GGUF [F16]      (of random weights; see file_shapes)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

MATRICES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}


SPARSE = "block_sparse_moe"
EXPERTS = {"ffn_gate_exps": "w1", "ffn_up_exps": "w3", "ffn_down_exps": "w2"}

DEVIATION = 0.02
"""Standard deviation of random weights."""


def read_bfloat16(folder: Path) -> dict[str, tuple[Path, int, list[int]]]:
    """{tensor: (file, offset, shape)} of every bfloat16 tensor in the checkpoint."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(size))
        for name, entry in header.items():
            if name != "__metadata__":
                assert entry["dtype"] == "BF16"
                found[name] = (file, 8 + size + entry["data_offsets"][0], entry["shape"])
    return found


def make_gguf(folder: Path, target: Path, form: str = "Q4_0") -> None:
    """Write the checkpoint's weights in this form to `target`."""
    import gguf

    config = json.loads((folder / "config.json").read_text())
    tensors = read_bfloat16(folder)
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    num_experts = config.get("num_local_experts", 0)
    if num_experts:
        writer.add_expert_count(num_experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(getattr(gguf.LlamaFileType, f"MOSTLY_{form}"))
    add_tokens(writer, config["vocab_size"])

    def read(source: str) -> np.ndarray:
        file, offset, shape = tensors[source]
        words = np.fromfile(file, np.uint16, int(np.prod(shape)), offset=offset)
        return (words.astype(np.uint32) << 16).view(np.float32).reshape(shape)

    def add(name: str, *sources: str, quantise: bool) -> None:
        """Several sources are matrices of experts, which lie in one tensor."""
        values = np.stack([read(each) for each in sources]) if sources[1:] else read(sources[0])
        if quantise:
            kind = gguf.GGMLQuantizationType[form]
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)

    add("token_embd.weight", "model.embed_tokens.weight", quantise=True)
    add("output_norm.weight", "model.norm.weight", quantise=False)
    if "lm_head.weight" in tensors:  # else the embedding is the head, too
        add("output.weight", "lm_head.weight", quantise=True)
    for layer in range(config["num_hidden_layers"]):
        for ours, theirs in MATRICES.items():
            if num_experts and theirs.startswith("mlp."):
                continue
            source = f"model.layers.{layer}.{theirs}.weight"
            add(f"blk.{layer}.{ours}.weight", source, quantise=True)
        if num_experts:
            prefix = f"model.layers.{layer}.{SPARSE}."
            add(f"blk.{layer}.ffn_gate_inp.weight", f"{prefix}gate.weight", quantise=False)
            for ours, theirs in EXPERTS.items():
                numbers = range(num_experts)
                sources = [f"{prefix}experts.{number}.{theirs}.weight" for number in numbers]
                add(f"blk.{layer}.{ours}.weight", *sources, quantise=True)
        for ours, theirs in NORMS.items():
            source = f"model.layers.{layer}.{theirs}.weight"
            add(f"blk.{layer}.{ours}.weight", source, quantise=False)
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


def make_random(facts: dict[str, Any], target: Path, form: str = "Q4_0") -> None:
    """Write random weights of these tensors to `target`, matrices in this form.

    facts: `architecture`, `metadata` by keys behind its name, and `tensors` as [name, shape, what
    all values are or None for a random matrix].
    """
    import gguf

    writer = gguf.GGUFWriter(target, facts["architecture"])
    whole = "ALL" if form == "F32" else "MOSTLY"
    writer.add_file_type(gguf.LlamaFileType[f"{whole}_{form}"])
    for key, value in facts["metadata"].items():
        name = f"{facts['architecture']}.{key}"
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        else:
            writer.add_uint32(name, value)
    add_tokens(writer, facts["metadata"]["vocab_size"])
    generator, kind = np.random.default_rng(0), gguf.GGMLQuantizationType[form]
    for name, shape, value in facts["tensors"]:
        if value is not None:
            writer.add_tensor(name, np.full(shape, value, np.float32))
            continue
        values = generator.standard_normal(shape, dtype=np.float32) * np.float32(DEVIATION)
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    source = Path(sys.argv[1])
    if source.suffix == ".json":
        make_random(json.loads(source.read_text()), Path(sys.argv[2]), *sys.argv[3:])
    else:
        make_gguf(source, Path(sys.argv[2]), *sys.argv[3:])
