"""Every Triton kernel becomes machine code for real GPUs, on a machine that has none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from edge.demos.bench import gpu
from edge.demos.bench.__main__ import cases
from edge.demos.bench.gpu import NO_GPU
from edge.demos.bench.results import RESULTS
from tests.support.slow_cases import shown_in_parts

REPOSITORY = Path(__file__).parents[3]

KERNELS = {
    "activation": {"_activated_kernel"},
    "attention": {"attend_tile", "_combine_kernel"},
    "embedding": {"_embedding_kernel"},
    "experts": {"_route_kernel", "_sort_kernel", "_expert_kernel", "_mix_kernel"},
    "gated_mlp": {"_gated_kernel"},
    "latent_attention": {"_rows_kernel", "_attend_kernel"},
    "layer_norm": {"_layer_norm_kernel"},
    "linear_attention": {"_delta_kernel", "_gated_norm_kernel"},
    "matmul_nbits": {"_product_kernel", "_sum_kernel", "_unpack_kernel"},
    "rms_norm": {"_rms_norm_kernel"},
    "rope": {"_rope_store_kernel"},
    "sampling": {"_best_kernel", "_unpack_kernel"},
    "short_convolution": {"_convolution_kernel", "_state_kernel"},
    "token_inputs": {"_inputs_kernel"},
}

SMALLEST_SHARED_MEMORY = 99 << 10
"""Bytes that a program may have on the smallest GPUs of these architectures."""


OF_ROWS = {
    "activation",
    "embedding",
    "gated_mlp",
    "layer_norm",
    "rms_norm",
    "rope",
    "token_inputs",
}
"""Operators that treat each row by itself."""


def test_kernels_that_treat_each_row_by_itself_compile_for_gpus(tmp_path: Path) -> None:
    found = {each["operator"] for each in compiled_there(tmp_path, "rows")}
    assert found >= OF_ROWS
    assert found < KERNELS.keys()


@shown_in_parts("contract/test_triton_program.py")
def test_every_kernel_compiles_for_gpus(tmp_path: Path) -> None:
    compiled = compiled_there(tmp_path)
    found: dict[str, set[str]] = {}
    for each in compiled:
        found.setdefault(each["operator"], set()).add(each["kernel"])
        assert each["shared_bytes"] <= SMALLEST_SHARED_MEMORY, each
    assert found == KERNELS
    assert {each["architecture"] for each in compiled} == {80, 90}
    check_that_longer_contexts_compile_nothing(compiled)


def compiled_there(cache: Path, *arguments: str) -> list[dict[str, Any]]:
    printed = run("tests.support.triton_compiler", *arguments, TRITON_CACHE_DIR=str(cache))
    found: list[dict[str, Any]] = json.loads(printed)
    return found


def check_that_longer_contexts_compile_nothing(compiled: list[dict[str, Any]]) -> None:
    """However many parts the keys are divided in, decoding launches one and the same kernel."""
    hashes: dict[str, list[str]] = {"attend_tile": [], "_combine_kernel": []}
    for each in compiled:
        if each["architecture"] == 80 and each["kernel"] in hashes:
            hashes[each["kernel"]].append(each["hash"])
    assert (len(hashes["attend_tile"]), len(set(hashes["attend_tile"]))) == (4 + 1, 1 + 1)
    # Latent attention has another one, whose rows are longer.
    assert (len(hashes["_combine_kernel"]), len(set(hashes["_combine_kernel"]))) == (4 + 1, 1 + 1)


@pytest.mark.parametrize(
    ("bench", "arguments"),
    [("gpu-kernels", []), ("gpu-decode", []), ("gpu-tuning", ["demos/model"]), ("gpu-stream", [])],
)
def test_the_benches_say_that_there_is_no_gpu(
    bench: str,
    arguments: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And are no error: a machine that has none runs everything else."""
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setattr(gpu, "num_cuda_devices", lambda: 0)
    cases.main([bench, *arguments], standalone_mode=False)
    assert capsys.readouterr().out.strip() == NO_GPU


@shown_in_parts("contract/test_triton_program.py", "e2e/test_bench.py")
def test_the_bench_of_decoding_runs_dry_where_there_is_no_gpu(tmp_path: Path) -> None:
    """Both sides of it, with tiny shapes; no figure of it is kept, also if asked to."""
    options = ("gpu-decode", "--dry-run", "--append")
    shown = run("edge.demos.bench", *options, EDGE_CACHE=str(tmp_path))
    for metric in ("speed  ", "weights / copy", "transformers bfloat16", "speed / transformers"):
        assert metric in shown
    assert "of a dry run" in shown
    assert "of a dry run" not in RESULTS.read_text()


def run(module: str, *arguments: str, **environment: str) -> str:
    """What it prints, in a process of its own, because here kernels are interpreted."""
    result = subprocess.run(
        [sys.executable, "-W", "error", "-m", module, *arguments],
        cwd=REPOSITORY, env={**os.environ, "TRITON_INTERPRET": "0", **environment},
        capture_output=True, text=True, timeout=580, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout
