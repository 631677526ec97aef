"""The five names are ours, others' packages still work, and a clash is told at the start."""

from __future__ import annotations

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from setuptools import find_packages

import edge
from edge.own_packages import PACKAGES, require_own_packages

REPOSITORY = Path(__file__).parents[2]


def run_python(*arguments: str, cwd: Path = REPOSITORY) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter; what lies in `cwd` comes before everything installed."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def installed_packages() -> set[str]:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["packages"]["find"]["include"]
    return set(find_packages(str(REPOSITORY), include=patterns))


@pytest.mark.parametrize("name", ["edge", *PACKAGES])
def test_the_name_resolves_inside_this_repository(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__file__ is not None
    assert Path(module.__file__).parents[1] == REPOSITORY
    require_own_packages()


def test_transformers_imports_beside_a_package_called_kernels() -> None:
    code = (
        "import kernels, transformers, transformers.integrations.hub_kernels\n"
        "from transformers import LlamaForCausalLM\n"
        "print(kernels.__file__)"
    )
    result = run_python("-c", code)
    assert result.returncode == 0, result.stderr
    assert Path(result.stdout.strip()) == REPOSITORY / "kernels" / "__init__.py"


def test_what_is_installed_is_every_folder_with_code() -> None:
    tops = {"edge", *PACKAGES, "demos"}
    found = {
        ".".join(file.parent.relative_to(REPOSITORY).parts)
        for top in tops
        for file in (REPOSITORY / top).rglob("*.py")
    }
    assert installed_packages() == found


@pytest.mark.parametrize("name", edge.__all__)
def test_the_public_name_imports(name: str) -> None:
    assert getattr(edge, name) is not None


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Clutser'"):
        _ = edge.Clutser  # type: ignore[attr-defined]


def test_a_package_of_the_same_name_in_front_is_told_in_one_sentence(tmp_path: Path) -> None:
    stranger = tmp_path / "kernels"
    stranger.mkdir()
    (stranger / "__init__.py").write_text("raise SystemExit('imported')")
    result = run_python("-m", "edge", "--help", cwd=tmp_path)
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.startswith(
        f"edge: package 'kernels' would be imported from {stranger}, which is not Edge's"
    )
    assert result.stderr.count("\n") == 1


def test_the_api_tells_it_too(tmp_path: Path) -> None:
    (tmp_path / "partition.py").write_text("raise SystemExit('imported')")
    result = run_python("-c", "import edge; edge.Cluster", cwd=tmp_path)
    assert result.returncode == 1
    assert f"package 'partition' would be imported from {tmp_path}" in result.stderr


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Edge as it lies in site-packages beside other distributions."""
    for name in ("edge", *PACKAGES):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    return tmp_path


def add_distribution(site: Path, stem: str, record: str) -> None:
    folder = site / f"{stem}.dist-info"
    folder.mkdir()
    (folder / "RECORD").write_text(record)


def test_a_distribution_that_overwrites_a_package_is_told(site: Path) -> None:
    add_distribution(site, "kernels-0.9", "kernels/__init__.py,sha256=x,1\nkernels/a.py,,\n")
    result = run_python("-m", "edge", "--help", cwd=site)
    assert result.returncode == 1
    assert "the distribution kernels-0.9 also owns package 'kernels'" in result.stderr


def test_a_distribution_that_only_has_the_name_is_fine(site: Path) -> None:
    add_distribution(site, "transport-1.0", "other/__init__.py,sha256=x,1\n")
    add_distribution(site, "edge_inference-0.1.0", "kernels/__init__.py,sha256=x,1\n")
    result = run_python("-m", "edge", "--help", cwd=site)
    assert result.returncode == 0, result.stderr
