"""Tables of measured tiles: kept, found again, and of no consequence when damaged."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edge.host.cache_paths import CACHE_VARIABLE
from tests.support.triton_face import only_interpreted

GPU: Any = SimpleNamespace(is_gpu=True, name="NVIDIA H200 (test)")


def test_what_is_kept_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only_interpreted()
    import torch

    from edge.backends.triton.tuning import (
        AttentionShape,
        ProductShape,
        TuningTable,
        keep_tuning,
        open_tuning,
    )
    from edge.kernels.attention.triton import AttentionTiles
    from edge.kernels.matmul_nbits.triton import ProductTiles
    from edge.kernels.triton_launch import Launch

    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    few = ProductShape(bits=4, rows=1, outputs=4096, inputs=14336)
    many = ProductShape(bits=8, rows=64, outputs=512, inputs=4096)
    of_few = ProductTiles(outputs=64, rows=8, launch=Launch(num_warps=8))
    of_many = ProductTiles(outputs=32, rows=64, splits=3, launch=Launch(num_stages=5))
    path = keep_tuning(GPU, TuningTable(products={few: of_few}))
    assert keep_tuning(GPU, TuningTable(products={many: of_many})) == path
    prompt = AttentionShape(bits=8, queries=256, group=4, head_size=128)
    tiles = AttentionTiles(rows=128, keys=32, launch=Launch(num_warps=8))
    keep_tuning(GPU, TuningTable(attentions={prompt: tiles}))
    assert path == tmp_path / "tuning" / "nvidia-h200-test.json"

    found = open_tuning(GPU, torch.bfloat16)
    assert found.product(few) == of_few
    for rows in (33, 64):
        assert found.product(ProductShape(bits=8, rows=rows, outputs=512, inputs=4096)) == of_many
    for rows in (32, 65, 1000):
        other = ProductShape(bits=8, rows=rows, outputs=512, inputs=4096)
        assert found.product(other) is None
    for queries in (17, 256, 4096):
        longer = AttentionShape(bits=8, queries=queries, group=4, head_size=128)
        assert found.attention(longer) == tiles
    for queries in (1, 16):
        other_attention = AttentionShape(bits=8, queries=queries, group=4, head_size=128)
        assert found.attention(other_attention) is None
    assert found.product(ProductShape(bits=8, rows=1, outputs=4096, inputs=14336)) is None
    assert open_tuning(GPU, torch.float32).product(few) is None, "tiles of 16 bits may not fit"


def entry(**changes: Any) -> dict[str, Any]:
    tiles = {"outputs": 128, "rows": 16, "splits": 1, "num_warps": 4, "num_stages": 2}
    return {"product": [4, 1, 10, 10], "tiles": {**tiles, **changes}}


def attention_entry(queries: int = 1, **changes: int) -> dict[str, Any]:
    tiles = {"rows": 16, "keys": 64, "num_warps": 4, "num_stages": 2}
    return {"attention": [4, queries, 4, 64], "tiles": {**tiles, **changes}}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[1]",
        "[" * 100_000,
        '[{"product": [4, 1, 10], "tiles": {}}]',
        '[{"product": [5, 1, 10, 10], "tiles": {}}]',
        '["product"]',
        '[{"tiles": {}}]',
        '[{"attention": [4, 1, 4, 64], "tiles": {}}]',
        json.dumps([attention_entry(queries=2)]),
        json.dumps([attention_entry(keys=8)]),
        json.dumps([attention_entry(splits=2)]),
        '[{"product": [4, 3, 10, 10], "tiles": {}}]',
        json.dumps([entry(rows=500)]),
        json.dumps([entry(outputs=-8)]),
        json.dumps([entry(outputs=1 << 20)]),
        json.dumps([entry(num_warps="4")]),
        json.dumps([entry(surprise=1)]),
        " " * (1 << 21),
        '[{"product": [4, 1, 64, 64], "tiles": []}]',
    ],
)
def test_a_damaged_table_is_passed_over(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    only_interpreted()
    import torch

    from edge.backends.triton.tuning import ProductShape, open_tuning

    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    path = tmp_path / "tuning" / "nvidia-h200-test.json"
    path.parent.mkdir()
    path.write_text(text)
    found = open_tuning(GPU, torch.bfloat16)
    assert found.product(ProductShape(bits=4, rows=1, outputs=10, inputs=10)) is None
    assert "so defaults are used" in caplog.text


def test_sound_entries_are_taken() -> None:
    """Those that the damaged tables above were made from."""
    only_interpreted()
    from edge.backends.triton.tuning import AttentionShape, ProductShape, TuningTable
    from edge.kernels.attention.triton import AttentionTiles
    from edge.kernels.matmul_nbits.triton import ProductTiles

    table = TuningTable.from_json(json.dumps([entry(), attention_entry()]))
    shape = AttentionShape(bits=4, queries=1, group=4, head_size=64)
    assert table.attention(shape) == AttentionTiles(rows=16)
    assert table.product(ProductShape(bits=4, rows=1, outputs=10, inputs=10)) == ProductTiles()
