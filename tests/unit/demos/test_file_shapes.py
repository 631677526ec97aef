"""Random GGUF files of benches: the models that they say they are."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from edge.demos.bench.file_shapes import FileShape, Tensor, gemma3, qwen35
from edge.demos.bench.gguf_file import make_random
from edge.demos.bench.versus_llama import HEAD, TABLE, read_of_token
from edge.models.linear_attention import LinearAttention
from edge.weights.checkpoint import Checkpoint

SIZES = {
    **{"layers": 6, "hidden": 64, "columns": 96},
    **{"heads": 4, "kv_heads": 2, "head": 256, "vocab": 320},
}


@pytest.mark.parametrize(
    ("shape", "plain"),
    [pytest.param(gemma3, [5], id="gemma3"), pytest.param(qwen35, [3], id="qwen35")],
)
def test_layers_of_two_kinds(
    shape: Callable[[Mapping[str, int]], FileShape], plain: list[int], tmp_path: Path
) -> None:
    made, path = shape(SIZES), tmp_path / "made.gguf"
    make_random(made.facts(), path)
    with Checkpoint.open(path) as checkpoint:
        spec = checkpoint.spec
        layers = [spec.layer(number).mixer for number in range(spec.num_layers)]
        found = [
            number
            for number, mixer in enumerate(layers)
            if not isinstance(mixer, LinearAttention) and getattr(mixer, "window", None) is None
        ]
        assert found == plain
        assert spec.vocab_size == SIZES["vocab"]
        assert spec.hidden_size == SIZES["hidden"]
    assert made.num_parameters > spec.vocab_size * spec.hidden_size


def test_a_token_reads_the_table_where_it_is_the_head(tmp_path: Path) -> None:
    """All of what is stored then, but for how tensors are aligned; without it the table is not."""
    made, tied, apart = gemma3(SIZES), tmp_path / "tied.gguf", tmp_path / "apart.gguf"
    make_random(made.facts(), tied)
    table = next(each for each in made.tensors if each[0] == TABLE)
    tensors = (*made.tensors, (HEAD, *table[1:]))
    make_random(replace(made, tensors=tensors).facts(), apart)
    whole = sum(
        math.prod(shape) * (18 / 32 if value is None else 4) for _, shape, value in made.tensors
    )
    assert read_of_token(tied) == read_of_token(apart) == whole


def test_a_token_reads_the_experts_that_it_goes_through(tmp_path: Path) -> None:
    path = tmp_path / "experts.gguf"
    one: tuple[Tensor, ...] = (("blk.0.ffn_up_exps.weight", (5, 64, 32), None),)
    facts = {"vocab_size": 320, "expert_count": 5, "expert_used_count": 2}
    make_random(FileShape(architecture="llama", metadata=facts, tensors=one).facts(), path)
    assert read_of_token(path) == 2 * 64 * 32 * 18 / 32
