"""What a further head gains, on a made-up model whose head is right as often as trained ones."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from edge.demos.bench import case
from edge.demos.bench.case import Found, Given
from edge.demos.bench.clusters.staged import STAGES, arrangement, model_in_stages
from edge.demos.bench.results import Figures
from edge.demos.bench.turns import compared, random_prompt
from edge.protocol.step import Speculation

_LAYERS, _HIDDEN, _COLUMNS, _HEADS, _KV_HEADS, _VOCABULARY = 20, 1024, 3072, 16, 4, 16_384
_ADDED = 0.012
"""What each layer adds to the hidden state, relative to the embedding. The next token depends on
the last one more than on those before it, so a head of one layer is often right."""

_SIDES: tuple[Speculation, ...] = ("off", "lookup", "mtp")


@case.case(
    "what a further head gains",
    case.number("--threads", 1),
    case.dtype("int8"),
    *case.lengths(64, 100),
    *STAGES,
    case.rounds(5),
    case.FOLDER,
)
def further_head(given: Given) -> Iterator[Found]:
    """What a further head (multi-token prediction) gains on text that is new.

    The model is of glm4_moe without experts, with random weights. All sides answer the same prompts
    in turn, greedily.
    """
    figures, tokens = Figures(), dict[int, tuple[int, ...]]()
    with contextlib.ExitStack() as stack:
        given.file = made_up(given.folder / "further-head")
        model = model_in_stages(stack, given, dtype=given.dtype, speculate="mtp")

        def side(speculate: Speculation, number: int) -> Mapping[str, float]:
            reply = model.generate(
                random_prompt(model, given.prompt_tokens, number),
                max_new_tokens=given.new_tokens, ignore_eos=True, speculate=speculate,
            )  # fmt: skip
            known = tokens.setdefault(number, reply.token_ids)
            if number and speculate != "off":
                found = reply.statistics
                right = found["accepted_tokens"] / max(1, found["drafted_tokens"])
                figures.add(f"{speculate}, per pass", "tokens", found["tokens_per_pass"])
                figures.add(f"{speculate}, right", "share", right)
                figures.add(f"{speculate}, same tokens", "share", float(known == reply.token_ids))
            return {"new text": reply.tokens_per_s}

        sides: dict[str, Callable[[int], Mapping[str, float]]] = {
            speculate: partial(side, speculate) for speculate in _SIDES
        }
        found = compared(sides, given.rounds, over="off", figures=figures)
    yield Found(figures=found, variant=f"{arrangement(given)}, {given.dtype}", model="glm4_moe")


def made_up(folder: Path, *, further_heads: int = 1) -> Path:
    """The checkpoint, unless it is there. Without a further head it is one of Llama."""
    path = folder / "model.safetensors"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        glm = {
            "model_type": "glm4_moe",
            "first_k_dense_replace": _LAYERS,
            "num_nextn_predict_layers": further_heads,
        }
        config = {
            **(glm if further_heads else {"model_type": "llama", "rms_norm_eps": 1e-5}),
            "num_hidden_layers": _LAYERS,
            "hidden_size": _HIDDEN,
            "intermediate_size": _COLUMNS,
            "num_attention_heads": _HEADS,
            "num_key_value_heads": _KV_HEADS,
            "head_dim": _HIDDEN // _HEADS,
            "vocab_size": _VOCABULARY,
            "max_position_embeddings": 4096,
        }
        (folder / "config.json").write_text(json.dumps(config))
        save_file(dict(_tensors(np.random.default_rng(0), further_heads)), path)
    return folder


def _tensors(random: np.random.Generator, further_heads: int) -> Iterator[tuple[str, NDArray[Any]]]:
    def matrix(rows: int, columns: int, gain: float = 1.0) -> NDArray[Any]:
        values = random.standard_normal((rows, columns), np.float32)
        return (values * np.float32(gain * columns**-0.5)).astype(ml_dtypes.bfloat16)

    def ones() -> NDArray[Any]:
        return np.ones(_HIDDEN, ml_dtypes.bfloat16)

    yield "model.embed_tokens.weight", matrix(_VOCABULARY, _HIDDEN, _HIDDEN**0.5)
    keys = _HIDDEN * _KV_HEADS // _HEADS
    for number in range(_LAYERS + further_heads):
        prefix = f"model.layers.{number}"
        for name, rows in (("q", _HIDDEN), ("k", keys), ("v", keys)):
            yield f"{prefix}.self_attn.{name}_proj.weight", matrix(rows, _HIDDEN)
        yield f"{prefix}.self_attn.o_proj.weight", matrix(_HIDDEN, _HIDDEN, _ADDED)
        for name in ("gate", "up"):
            yield f"{prefix}.mlp.{name}_proj.weight", matrix(_COLUMNS, _HIDDEN)
        yield f"{prefix}.mlp.down_proj.weight", matrix(_HIDDEN, _COLUMNS, 2 * _ADDED)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}.{name}.weight", ones()
    if further_heads:
        joined = np.concatenate([np.eye(_HIDDEN), np.zeros((_HIDDEN, _HIDDEN))], axis=1)
        yield f"{prefix}.eh_proj.weight", joined.astype(ml_dtypes.bfloat16)
        for name in ("enorm", "hnorm", "shared_head.norm"):
            yield f"{prefix}.{name}.weight", ones()
    yield "model.norm.weight", ones()
    yield "lm_head.weight", matrix(_VOCABULARY, _HIDDEN)
