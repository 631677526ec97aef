"""Every back end's program keeps the same promises."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from edge.protocol.peer_info import BACKENDS
from tests.support.program_contract import CHECKS, MODELS, Kind
from tests.support.swiftshader import needs_swiftshader, webgpu_environment
from tests.support.triton_face import device

ROOT = Path(__file__).parents[2]
OF_THEIR_OWN_PROCESS = ("ort", "webgpu")


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name not in OF_THEIR_OWN_PROCESS])
@pytest.mark.parametrize("model", MODELS)
def test_back_end(model: str, backend: str, check: str, tmp_path: Path) -> None:
    assert device(), "kernels are interpreted where there is no GPU"
    CHECKS[check](Kind(backend, tmp_path, MODELS[model]))


@pytest.mark.linux_ways
@pytest.mark.parametrize("backend", ["ort", pytest.param("webgpu", marks=needs_swiftshader)])
@pytest.mark.parametrize("model", MODELS)
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
