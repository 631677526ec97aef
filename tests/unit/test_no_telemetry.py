"""Using Edge leaves nothing in the home directory that the user did not ask for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from demos.bundled import MODEL
from tests.support.processes import PATIENCE_S


def test_onnx_runtime_neither_identifies_nor_reports(tmp_path: Path) -> None:
    """Its wheels for Linux keep a device id and a database of events unless told not to."""
    environment = {**os.environ, "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    environment.pop("ORT_DISABLE_TELEMETRY", None)
    subprocess.run(
        [sys.executable, "-c", "import edge.backends.ort.backend"],
        env=environment,
        check=True,
        timeout=PATIENCE_S,
    )
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_looking_at_a_model_leaves_nothing(tmp_path: Path) -> None:
    """Where models by name are looked for, the library of Hugging Face is asked."""
    environment = {**os.environ, "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    environment = {name: each for name, each in environment.items() if not name.startswith("HF_")}
    subprocess.run(
        [sys.executable, "-m", "edge", "inspect", str(MODEL)],
        env=environment,
        stdout=subprocess.DEVNULL,
        check=True,
        timeout=PATIENCE_S,
    )
    assert list(tmp_path.iterdir()) == []
