"""Random checkpoints of named shapes: speed and memory depend on sizes, not on what was learned."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

CONTEXT_TOKENS = 32_768
WEIGHT_DEVIATION = 0.02
"""Standard deviation of the weights; what most models start their training from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a Llama, or of a Mixtral where it has experts."""

    num_layers: int
    hidden_size: int
    ffn_columns: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    tied_embeddings: bool = False
    num_experts: int = 0
    """Experts of every layer, each of `ffn_columns`; 0 for one block that all tokens go through."""
    top_k: int = 0

    @property
    def num_parameters(self) -> int:
        return sum(rows * columns for _name, (rows, columns) in self.matrices())

    def matrices(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """(name, [outputs, inputs]) of every matrix, layer by layer."""
        hidden, query = self.hidden_size, self.num_heads * self.head_size
        key_value = self.num_kv_heads * self.head_size
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}."
            yield f"{prefix}self_attn.q_proj.weight", (query, hidden)
            yield f"{prefix}self_attn.k_proj.weight", (key_value, hidden)
            yield f"{prefix}self_attn.v_proj.weight", (key_value, hidden)
            yield f"{prefix}self_attn.o_proj.weight", (hidden, query)
            blocks = {f"{prefix}mlp.": ("gate_proj", "up_proj", "down_proj")}
            if self.num_experts:
                prefix += "block_sparse_moe."
                yield f"{prefix}gate.weight", (self.num_experts, hidden)
                numbers = range(self.num_experts)
                blocks = {f"{prefix}experts.{number}.": ("w1", "w3", "w2") for number in numbers}
            for own, (gate, up, down) in blocks.items():
                yield f"{own}{gate}.weight", (self.ffn_columns, hidden)
                yield f"{own}{up}.weight", (self.ffn_columns, hidden)
                yield f"{own}{down}.weight", (hidden, self.ffn_columns)
        yield "model.embed_tokens.weight", (self.vocab_size, hidden)
        if not self.tied_embeddings:
            yield "lm_head.weight", (self.vocab_size, hidden)

    def norms(self) -> Iterator[str]:
        for layer in range(self.num_layers):
            yield f"model.layers.{layer}.input_layernorm.weight"
            yield f"model.layers.{layer}.post_attention_layernorm.weight"
        yield "model.norm.weight"


_FIELDS = (
    "num_layers", "hidden_size", "ffn_columns", "num_heads", "num_kv_heads", "head_size",
    "vocab_size",
)  # fmt: skip


def _shape(*sizes: int, **more: Any) -> Shape:
    more |= zip(_FIELDS, sizes, strict=True)
    return Shape(**more)


SHAPES = {
    "tiny": _shape(4, 256, 704, 8, 4, 32, 512),
    # Made in a second; in float32 larger than a peer's overhead.
    "small": _shape(12, 768, 2048, 12, 4, 64, 512),
    # Every row has whole blocks of 256, so that each type of GGUF can hold each matrix.
    "blocks": _shape(4, 512, 1024, 8, 4, 64, 512),
    # 0.17 B: what a newcomer may try first.
    "M": _shape(12, 1024, 2816, 16, 4, 64, 16_000),
    # 0.5 B: as Qwen2.5 0.5B without its biases.
    "H": _shape(24, 896, 4864, 14, 2, 64, 151_936, tied_embeddings=True),
    # 1.1 B: as TinyLlama.
    "W": _shape(22, 2048, 5632, 32, 4, 64, 32_000),
    # 2.9 B, of which a token goes through 0.36 B.
    "E": _shape(16, 1536, 768, 24, 4, 64, 16_000, num_experts=48, top_k=4),
    # 3.2 B: as Llama 3.2 3B.
    "T": _shape(28, 3072, 8192, 24, 8, 128, 128_256, tied_embeddings=True),
}
"""Layers, hidden size, feed-forward columns, heads, KV heads, head size, vocabulary."""


def described(name: str) -> str:
    """The named shape in the words of results.csv."""
    return f"{name} ({SHAPES[name].num_parameters / 1e9:.2g} B, random)"


def checkpoint(name: str, folder: Path) -> Path:
    """The folder of the named shape's checkpoint below `folder`, written if it is not there."""
    target = folder / name
    if not target.is_dir():
        partial = folder / f"{name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _write(SHAPES[name], partial)
        partial.rename(target)
    return target


def _write(shape: Shape, folder: Path) -> None:
    """bfloat16 weights, a file for each layer: no more than one layer is in memory at once."""
    files: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, size in [*shape.matrices(), *((n, (shape.hidden_size,)) for n in shape.norms())]:
        layer = name.split(".")[2] if name.startswith("model.layers.") else "rest"
        files.setdefault(f"model-{layer}.safetensors", {})[name] = size
    generator = np.random.default_rng(0)
    for file, sizes in files.items():
        save_file({name: _values(generator, size) for name, size in sizes.items()}, folder / file)
    index = {name: file for file, sizes in files.items() for name in sizes}
    _write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": index})
    _write_json(folder / "config.json", _config(shape))
    _write_tokenizer(folder)


def _values(generator: np.random.Generator, size: tuple[int, ...]) -> NDArray[ml_dtypes.bfloat16]:
    if len(size) == 1:
        return np.ones(size, ml_dtypes.bfloat16)
    normal = generator.standard_normal(size, dtype=np.float32)
    normal *= np.float32(WEIGHT_DEVIATION)
    return normal.astype(ml_dtypes.bfloat16)


def _config(shape: Shape) -> dict[str, object]:
    """No end token: a random model would stop anywhere, and figures need every token."""
    kind = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    if shape.num_experts:
        kind = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
    experts = {"num_local_experts": shape.num_experts, "num_experts_per_tok": shape.top_k}
    return {
        **kind,
        **(experts if shape.num_experts else {}),
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.ffn_columns,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_size,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": shape.tied_embeddings,
        "max_position_embeddings": CONTEXT_TOKENS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "hidden_act": "silu",
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": "bfloat16",
    }


def _write_tokenizer(folder: Path) -> None:
    """One token for each byte, so that every shape can be given text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
