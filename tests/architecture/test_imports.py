"""Who may import whom, and that starting is cheap."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.test_names import REPOSITORY, run_python

HEAVY = ("torch", "triton", "transformers", "onnx", "onnxruntime", "numpy", "zeroconf", "rich")
"""What neither `import edge` nor `edge --help` needs."""


def test_the_import_contracts_hold(tmp_path: Path) -> None:
    made = run_python("scripts/one-package", str(tmp_path))
    assert made.returncode == 0, made.stderr
    linter = Path(sys.executable).with_name("lint-imports")
    result = subprocess.run(
        [linter, str(REPOSITORY / "pyproject.toml"), "--no-cache"],
        cwd=tmp_path,  # what lies there comes first
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 broken" in result.stdout


def test_kernels_itself_is_only_a_docstring() -> None:
    body = ast.parse((REPOSITORY / "kernels" / "__init__.py").read_text()).body
    assert len(body) == 1
    assert isinstance(body[0], ast.Expr)
    assert isinstance(body[0].value, ast.Constant)


@pytest.mark.parametrize(
    "code",
    [
        "import edge",
        "import edge; edge.EdgeError",
        "from edge.cli.main import cli; cli.main(['--help'], standalone_mode=False)",
    ],
    ids=["import", "an error class", "help"],
)
def test_starting_imports_nothing_heavy(code: str) -> None:
    result = run_python("-c", f"{code}\nimport sys; print(*sys.modules)")
    assert result.returncode == 0, result.stderr
    assert "edge" in result.stdout.split()
    assert set(result.stdout.split()).isdisjoint(HEAVY)


def test_python_m_edge_help_lists_every_command() -> None:
    result = run_python("-X", "importtime", "-m", "edge", "--help")
    assert result.returncode == 0, result.stderr
    for command in ("peer", "peers", "plan", "run", "chat", "demo"):
        assert f"\n  {command} " in result.stdout
    imported = {line.split("|")[-1].strip() for line in result.stderr.splitlines()}
    assert "edge.cli.main" in imported
    assert imported.isdisjoint(HEAVY)


def test_the_whole_api_and_a_daemon_need_no_torch() -> None:
    code = (
        "import edge, edge.peer.daemon, edge.backends.ort.backend, edge.backends.triton.backend\n"
        "for name in edge.__all__: getattr(edge, name)\n"
        "import sys; print(*sys.modules)"
    )
    result = run_python("-c", code)
    assert result.returncode == 0, result.stderr
    imported = set(result.stdout.split())
    assert "onnxruntime" in imported
    assert imported.isdisjoint(("torch", "triton", "transformers"))
