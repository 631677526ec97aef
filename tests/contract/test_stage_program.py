"""Every back end's program keeps the same promises."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from edge.protocol.peer_info import BACKENDS
from tests.support.program_contract import CHECKS, MODELS, Kind
from tests.support.slow_cases import shown_in_parts
from tests.support.swiftshader import needs_swiftshader, webgpu_environment
from tests.support.triton_face import device

ROOT = Path(__file__).parents[2]
OF_THEIR_OWN_PROCESS = ("ort", "webgpu")
IN_SOFTWARE = (
    needs_swiftshader,
    shown_in_parts("contract/test_webgpu_operators.py", "e2e/test_webgpu_peers.py"),
)


HERE = [name for name in BACKENDS if name not in OF_THEIR_OWN_PROCESS]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize(
    ("model", "backend"),
    [
        pytest.param(
            model,
            backend,
            # Interpreted kernels take longest.
            marks=shown_in_parts("contract/test_triton_program.py")
            if (model, backend) == ("latent", "triton")
            else (),
        )
        for model in MODELS
        for backend in HERE
    ],
)
def test_back_end(model: str, backend: str, check: str, tmp_path: Path) -> None:
    assert device(), "kernels are interpreted where there is no GPU"
    CHECKS[check](Kind(backend, tmp_path, MODELS[model]))


@pytest.mark.linux_ways
@pytest.mark.parametrize("backend", ["ort", pytest.param("webgpu", marks=IN_SOFTWARE)])
@pytest.mark.parametrize(
    "model", ["plain", pytest.param("latent", marks=shown_in_parts("contract/test_operators.py"))]
)
def test_back_end_in_a_process_of_its_own(model: str, backend: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-W", "error", "-m", "tests.support.program_contract"),
            *(backend, tmp_path, model),
        ],
        cwd=ROOT,
        env={**os.environ, **(webgpu_environment() if backend == "webgpu" else {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == list(CHECKS)
