"""Every back end's program keeps the same promises."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from edge.protocol.peer_info import BACKENDS
from tests.support.program_contract import CHECKS, Kind
from tests.support.triton_face import device

ROOT = Path(__file__).parents[2]
OF_ITS_OWN_PROCESS = "ort"


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != OF_ITS_OWN_PROCESS])
def test_back_end(backend: str, check: str, tmp_path: Path) -> None:
    assert device(), "kernels are interpreted where there is no GPU"
    CHECKS[check](Kind(backend, tmp_path))


@pytest.mark.linux_ways
def test_back_end_in_a_process_of_its_own(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-W", "error", "-m", "tests.support.program_contract"),
            *(OF_ITS_OWN_PROCESS, tmp_path),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == list(CHECKS)
