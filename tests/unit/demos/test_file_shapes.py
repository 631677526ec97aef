"""Random GGUF files of benches: the models that they say they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from edge.demos.bench.file_shapes import FileShape, gemma3, qwen35
from edge.demos.bench.gguf_file import make_random
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
