"""ONNX Runtime's operators are compared with the reference, in every kind of shard."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from edge.backends.onnx import attention_inputs
from edge.backends.onnx import self_check as ort_self_check
from edge.backends.onnx.self_check import run_self_check
from edge.backends.shard_arrays import ShardArrays
from edge.errors import CheckpointError, RequestError
from edge.kernels.onnx_graph import OnnxGraph
from edge.models.spec import ModelSpec
from edge.profiling.random_weights import written_weights
from edge.weights.layout import shard_layout
from tests.support.formats import uniform_format
from tests.support.halves import SIZES, SPEC
from tests.support.plans import make_plan
from tests.support.specs import changed, few_random_bytes

WITH_EVERYTHING = changed(
    SPEC, head_size=64, inverse_frequencies=tuple(100.0 ** -(i / 32) for i in range(32)),
    windows=(3, None, 3, 3), qkv_bias=True, output_bias=True, mlp_bias=True, query_key_norm=True,
)  # fmt: skip
FORMATS = [("float32", "fast"), ("int8", "fast"), ("int4", "fast"), ("int4", "high")]


def opened(model: bytes) -> ort.InferenceSession:
    """With threads of its own: a process that computes as a peer does takes no others."""
    chosen = ort.SessionOptions()
    chosen.intra_op_num_threads = 1
    chosen.log_severity_level = 3
    return ort.InferenceSession(model, chosen, providers=["CPUExecutionProvider"])


@contextmanager
def shard(
    folder: Path,
    spec: ModelSpec = SPEC,
    *,
    layout: str = "tensor_2",
    rank: int = 0,
    form: tuple[str, str] = FORMATS[0],
) -> Iterator[ShardArrays]:
    chosen = uniform_format(form[0], 32, form[1])
    multiple = chosen.recipe.column_multiple({"down.weight"})
    plan = make_plan(spec, layout, model="m", column_multiple=multiple)
    cut = shard_layout(spec, plan, stage=0, rank=rank)
    with few_random_bytes(), written_weights(cut, chosen, folder) as weights:
        yield ShardArrays(cut, weights, chosen)


@pytest.mark.parametrize("rows", [None, (0, 1)])
def test_a_file_that_was_cut_is_named(rows: tuple[int, ...] | None, tmp_path: Path) -> None:
    with shard(tmp_path) as arrays:
        assert arrays.read("embedding", rows).size
        os.truncate(arrays.path, arrays.entry("embedding").offset + 5)
        with pytest.raises(CheckpointError, match="ends within embedding"):
            arrays.read("embedding", rows)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("spec", [SPEC, WITH_EVERYTHING], ids=["plain", "with everything"])
@pytest.mark.parametrize(
    ("layout", "rank"), [("solo", 0), *((name, r) for name in SIZES for r in range(SIZES[name]))]
)
def test_this_machine_agrees(
    spec: ModelSpec, layout: str, rank: int, form: tuple[str, str], tmp_path: Path
) -> None:
    """Shards without heads, columns or vocabulary too."""
    with shard(tmp_path, spec, layout=layout, rank=rank, form=form) as arrays:
        run_self_check(spec, arrays, opened)


@pytest.mark.parametrize(
    ("face", "form", "operator"),
    [
        ("product", FORMATS[0], "matmul (layers.0.qkv), 1 row"),
        ("product", FORMATS[1], "matmul_nbits (layers.0.qkv), 1 row"),
        ("product", FORMATS[3], "matmul_nbits (layers.0.qkv), 1 row"),
        ("gated", FORMATS[0], "gated_mlp, 1 row"),
        ("add_rms_norm", FORMATS[0], "rms_norm (layers.0.attention_norm), 1 row"),
        ("attention", FORMATS[0], "rope and attention (layer 0), 1 row"),
    ],
)
@pytest.mark.parametrize("factor", [1.1, np.nan])
def test_the_operator_that_is_wrong_is_named(
    face: str,
    form: tuple[str, str],
    operator: str,
    factor: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A tenth too large is wrong in every format."""
    owner = attention_inputs if face == "attention" else ort_self_check
    right = getattr(owner, face)

    def wrong(graph: OnnxGraph, *names: Any, **named: Any) -> Any:
        values = right(graph, *names, **named)
        many = values if isinstance(values, tuple) else (values,)
        scale = graph.constant("wrong", np.asarray(factor, np.float32))
        first = graph.node("Mul", many[0], scale)
        return (first, *many[1:]) if isinstance(values, tuple) else first

    monkeypatch.setattr(owner, face, wrong)
    with (
        shard(tmp_path, form=form) as arrays,
        pytest.raises(RequestError, match="back end ort computes wrongly") as refused,
    ):
        run_self_check(SPEC, arrays, opened)
    assert f"{operator} errs by" in str(refused.value)
