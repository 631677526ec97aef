"""A GGUF file whose head is in floats: that is held in 8 bits, all else in the file's own codes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from edge.models.parts import MatrixSlice
from edge.weights.block_matrices import Blocks
from edge.weights.checkpoint import Checkpoint
from edge.weights.file_blocks import FileBlocks
from edge.weights.format_sizes import in_words
from edge.weights.formats import weight_format
from tests.support.checkpoints import make_checkpoint
from tests.support.gguf_files import Type, write_gguf

_ERROR_OF_8_BITS = 0.01
"""Half a step of 1/127 of a block's largest weight, which is two or three times the usual one."""


def head_in_floats(name: str) -> int:
    return int(Type.F16 if name in ("output.weight", "token_embd.weight") else Type.Q4_0)


@pytest.mark.parametrize("name", ["llama_in_blocks", "qwen3_in_blocks"])
def test_a_head_of_floats_is_held_in_8_bits(name: str, tmp_path: Path) -> None:
    """A matrix of its own, and the table of embeddings."""
    made = make_checkpoint(tmp_path / "made", name)
    path = tmp_path / "model.gguf"
    meant = load_file(write_gguf(path, made.path, kind=head_in_floats).path / "model.safetensors")
    with Checkpoint.open(path) as opened:
        chosen = weight_format(opened.spec, "auto", own=opened.own_encoding)
        assert chosen.name == "as stored"
        assert "the head, which is in floats there, in 8 bits" in in_words(opened.spec, chosen)
        source = opened.source(chosen, cache_root=tmp_path, on_progress=lambda progress: None)
        for role, largest_error in (("head", _ERROR_OF_8_BITS), ("layers.1.up.weight", 0.0)):
            kind = chosen.recipe.kind(role, 0)
            assert isinstance(kind, Blocks if role == "head" else FileBlocks)
            assert kind.bits == (8 if role == "head" else 4)
            whole = meant.get("lm_head.weight", meant["model.embed_tokens.weight"])
            if role != "head":
                whole = meant["model.layers.1.mlp.up_proj.weight"]
            rows, columns = range(3, len(whole) - 2), range(whole.shape[1])
            arrays = source.matrix(MatrixSlice(name="x", parts=((role, rows),), columns=columns))
            found = kind.floats(arrays.__getitem__, len(columns))[: len(rows)]
            error = np.linalg.norm(found - whole[3:-2]) / np.linalg.norm(whole)
            assert error <= largest_error
            assert (error > 0) == (role == "head")
        source.close()
