"""Faces of operators on a graphics adapter, here one in software, compute what references say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.slow_cases import shown_in_parts
from tests.support.swiftshader import needs_swiftshader, webgpu_environment

ROOT = Path(__file__).parents[2]

OF_THE_CPU = "in_one_node or accuracy_buys"
"""Tests of what WebGPU does not compute: QMoE, and rounding of inputs to 8 bits."""


@needs_swiftshader
@shown_in_parts("contract/test_stage_program.py", "e2e/test_webgpu_peers.py")
def test_faces_are_right_on_a_graphics_adapter() -> None:
    """In a process of its own: a process that computes as a peer does takes no other sessions."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-n0", "-x", "-k", f"not ({OF_THE_CPU})"),
            "tests/contract/test_operators.py",
        ],
        cwd=ROOT,
        env={**os.environ, **webgpu_environment(), "EDGE_TESTED_PROVIDER": "webgpu"},
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
