"""Random GGUF files in the shapes of models that are no Llama: Edge and llama.cpp take one file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from edge.demos.shapes import CONTEXT_TOKENS

Tensor = tuple[str, tuple[int, ...], float | None]
"""Name, shape, and what all its values are; None: a matrix of random ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileShape:
    """What is in a file, in the words of GGUF."""

    architecture: str
    metadata: Mapping[str, Any]
    """Keys behind the architecture's name."""
    tensors: tuple[Tensor, ...]
    """Where there is no `output.weight`, the embedding is the head, too."""

    @property
    def num_parameters(self) -> int:
        total = 0
        for _name, shape, _value in self.tensors:
            count = 1
            for size in shape:
                count *= size
            total += count
        return total

    def facts(self) -> dict[str, Any]:
        """For `gguf_file.make_random`."""
        return {
            "architecture": self.architecture,
            "metadata": dict(self.metadata),
            "tensors": self.tensors,
        }


def _usual(sizes: Mapping[str, int]) -> dict[str, Any]:
    return {
        "block_count": sizes["layers"],
        "context_length": CONTEXT_TOKENS,
        "embedding_length": sizes["hidden"],
        "feed_forward_length": sizes["columns"],
        "attention.head_count": sizes["heads"],
        "attention.head_count_kv": sizes["kv_heads"],
        "attention.key_length": sizes["head"],
        "attention.value_length": sizes["head"],
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.dimension_count": sizes["head"],
        "rope.freq_base": 1e6,
        "vocab_size": sizes["vocab"],
    }


def _attention(block: str, facts: Mapping[str, Any], *, queries: int = 1) -> Iterator[Tensor]:
    """queries: 2 where each head has a gate behind it."""
    hidden, head = facts["embedding_length"], facts["attention.key_length"]
    query = facts["attention.head_count"] * head
    key = facts["attention.head_count_kv"] * head
    yield f"{block}attn_q.weight", (queries * query, hidden), None
    yield f"{block}attn_k.weight", (key, hidden), None
    yield f"{block}attn_v.weight", (key, hidden), None
    yield f"{block}attn_output.weight", (hidden, query), None
    yield f"{block}attn_q_norm.weight", (head,), 1.0
    yield f"{block}attn_k_norm.weight", (head,), 1.0


def _feed_forward(block: str, facts: Mapping[str, Any]) -> Iterator[Tensor]:
    hidden, columns = facts["embedding_length"], facts["feed_forward_length"]
    yield f"{block}ffn_gate.weight", (columns, hidden), None
    yield f"{block}ffn_up.weight", (columns, hidden), None
    yield f"{block}ffn_down.weight", (hidden, columns), None


def _linear_attention(block: str, facts: Mapping[str, Any]) -> Iterator[Tensor]:
    hidden, keys = facts["embedding_length"], facts["ssm.group_count"] * facts["ssm.state_size"]
    heads, values = facts["ssm.time_step_rank"], facts["ssm.inner_size"]
    yield f"{block}attn_qkv.weight", (2 * keys + values, hidden), None
    yield f"{block}attn_gate.weight", (values, hidden), None
    yield f"{block}ssm_alpha.weight", (heads, hidden), None
    yield f"{block}ssm_beta.weight", (heads, hidden), None
    yield f"{block}ssm_conv1d.weight", (2 * keys + values, facts["ssm.conv_kernel"]), 0.25
    yield f"{block}ssm_dt.bias", (heads,), 0.0
    yield f"{block}ssm_a", (heads,), -1.0
    yield f"{block}ssm_norm.weight", (values // heads,), 1.0
    yield f"{block}ssm_out.weight", (hidden, values), None


def _norms(block: str, facts: Mapping[str, Any], *names: str) -> Iterator[Tensor]:
    for name in names:
        yield f"{block}{name}.weight", (facts["embedding_length"],), 1.0


def _ends(facts: Mapping[str, Any]) -> Iterator[Tensor]:
    yield "token_embd.weight", (facts["vocab_size"], facts["embedding_length"]), None
    yield from _norms("", facts, "output_norm")


_GEMMA_3 = {
    **{"layers": 26, "hidden": 1152, "columns": 6912},
    **{"heads": 4, "kv_heads": 1, "head": 256, "vocab": 262_144},
}
_QWEN3_5 = {
    **{"layers": 24, "hidden": 1024, "columns": 3584},
    **{"heads": 8, "kv_heads": 2, "head": 256, "vocab": 248_320},
}


def gemma3(sizes: Mapping[str, int]) -> FileShape:
    """As Gemma 3 1B: of six layers five see a window."""
    facts = _usual(sizes) | {"rope.freq_base_swa": 1e4, "attention.sliding_window": 512}
    found = list(_ends(facts))
    for layer in range(facts["block_count"]):
        block = f"blk.{layer}."
        names = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
        found += _norms(block, facts, *names)
        found += _attention(block, facts)
        found += _feed_forward(block, facts)
    return FileShape(architecture="gemma3", metadata=facts, tensors=tuple(found))


def qwen35(sizes: Mapping[str, int]) -> FileShape:
    """As Qwen3.5 0.8B: of four layers three are linear attention."""
    facts = _usual(sizes) | {
        "rope.dimension_count": 64,
        "rope.dimension_sections": [11, 11, 10, 0],
        "rope.freq_base": 1e7,
        "full_attention_interval": 4,
        "ssm.conv_kernel": 4,
        "ssm.state_size": 128,
        "ssm.group_count": 16,
        "ssm.time_step_rank": 16,
        "ssm.inner_size": 2048,
    }
    found = list(_ends(facts))
    for layer in range(facts["block_count"]):
        block = f"blk.{layer}."
        found += _norms(block, facts, "attn_norm", "post_attention_norm")
        if (layer + 1) % facts["full_attention_interval"]:
            found += _linear_attention(block, facts)
        else:
            found += _attention(block, facts, queries=2)
        found += _feed_forward(block, facts)
    return FileShape(architecture="qwen35", metadata=facts, tensors=tuple(found))


FILE_SHAPES = {"Gemma-3": gemma3(_GEMMA_3), "Qwen3.5": qwen35(_QWEN3_5)}
