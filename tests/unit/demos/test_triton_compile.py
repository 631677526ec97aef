"""Every Triton kernel becomes machine code for real GPUs, on a machine that has none."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from edge.demos.bench import gpu
from edge.demos.bench.gpu import NO_GPU
from edge.demos.bench.results import RESULTS

REPOSITORY = Path(__file__).parents[3]

KERNELS = {
    "attention": {"attend_tile", "_combine_kernel"},
    "embedding": {"_embedding_kernel"},
    "experts": {"_route_kernel", "_sort_kernel", "_use_kernel", "_tile_kernel", "_mix_kernel"},
    "gated_mlp": {"_activated_kernel", "_gated_kernel"},
    "latent_heads": {"_heads_kernel"},
    "layer_norm": {"_layer_norm_kernel"},
    "linear_attention": {"_delta_kernel", "_gated_norm_kernel"},
    "matmul": {"_gemv_kernel", "_gemm_kernel", "_sum_kernel"},
    "matmul_nbits": {"_gemv_kernel", "_gemm_kernel"},
    "rms_norm": {"_rms_norm_kernel"},
    "rope": {"_rope_kernel", "_rope_store_kernel"},
    "sampling": {"_best_kernel", "_unpack_kernel"},
    "short_convolution": {"_convolution_kernel", "_state_kernel"},
    "token_inputs": {"_inputs_kernel"},
}

SMALLEST_SHARED_MEMORY = 99 << 10
"""Bytes that a program may have on the smallest GPUs of these architectures."""


@pytest.fixture(scope="module")
def printed(
    tmp_path_factory: pytest.TempPathFactory, nothing_left_running_by_the_module: None
) -> Iterator[dict[str, Future[str]]]:
    """What the two programs print that take their time; they run side by side."""
    caches = [str(tmp_path_factory.mktemp(name)) for name in ("triton", "edge")]
    with ThreadPoolExecutor(2) as pool:
        yield {
            "compiler": pool.submit(
                run, "tests.support.triton_compiler", TRITON_CACHE_DIR=caches[0]
            ),
            "bench": pool.submit(
                run, "edge.demos.bench.gpu_decode", "--dry-run", "--append", EDGE_CACHE=caches[1]
            ),
        }


def test_every_kernel_compiles_for_gpus(printed: dict[str, Future[str]]) -> None:
    compiled = json.loads(printed["compiler"].result())
    found: dict[str, set[str]] = {}
    for each in compiled:
        found.setdefault(each["operator"], set()).add(each["kernel"])
        assert each["shared_bytes"] <= SMALLEST_SHARED_MEMORY, each
    assert found == KERNELS
    assert {each["architecture"] for each in compiled} == {80, 90}
    check_that_longer_contexts_compile_nothing(compiled)


def check_that_longer_contexts_compile_nothing(compiled: list[dict[str, Any]]) -> None:
    """However many parts the keys are divided in, decoding launches one and the same kernel."""
    hashes: dict[str, list[str]] = {"attend_tile": [], "_combine_kernel": []}
    for each in compiled:
        if each["architecture"] == 80 and each["kernel"] in hashes:
            hashes[each["kernel"]].append(each["hash"])
    assert (len(hashes["attend_tile"]), len(set(hashes["attend_tile"]))) == (4 + 1, 1 + 1)
    assert (len(hashes["_combine_kernel"]), len(set(hashes["_combine_kernel"]))) == (4, 1)


@pytest.mark.parametrize(
    ("bench", "arguments"),
    [("gpu_kernels", []), ("gpu_decode", []), ("gpu_tuning", ["demos/model"]), ("gpu_stream", [])],
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
    main = importlib.import_module(f"edge.demos.bench.{bench}").main
    main(arguments, standalone_mode=False)
    assert capsys.readouterr().out.strip() == NO_GPU


def test_the_bench_of_decoding_runs_dry_where_there_is_no_gpu(
    printed: dict[str, Future[str]],
) -> None:
    """Both sides of it, with tiny shapes; no figure of it is kept, also if asked to."""
    shown = printed["bench"].result()
    for metric in ("speed  ", "weights / copy", "transformers bfloat16", "speed / transformers"):
        assert metric in shown
    assert "of a dry run" in shown
    assert "of a dry run" not in RESULTS.read_text()


def run(module: str, *arguments: str, **environment: str) -> str:
    """What it prints, in a process of its own, because here kernels are interpreted."""
    result = subprocess.run(
        [sys.executable, "-W", "error", "-m", module, *arguments],
        cwd=REPOSITORY, env={**os.environ, "TRITON_INTERPRET": "0", **environment},
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout
