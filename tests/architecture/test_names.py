"""Edge takes one name of an environment, and lives there with packages called like its parts."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import edge

REPOSITORY = Path(__file__).parents[2]

PARTS = ("demos", "kernels", "offload", "partition", "transport")
"""Folders at the top of the repository that are packages of edge."""

NOT_IN_WHEEL = ("edge.demos.bench", "edge.kernels.native")
"""Benches run from a checkout, and native kernels are a distribution of their own."""


def run_python(
    *arguments: str, cwd: Path = REPOSITORY, **environment: str
) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter; what lies in `cwd` comes before everything installed."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("part", PARTS)
def test_a_top_folder_is_a_package_of_edge(part: str) -> None:
    module = importlib.import_module(f"edge.{part}")
    assert module.__file__ is not None
    assert Path(module.__file__) == REPOSITORY / part / "__init__.py"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages: Edge's wheel, built and unpacked, with those of other distributions."""
    place = tmp_path_factory.mktemp("wheel")
    source = place / "source"
    ignored = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__", "tests", "docs")
    shutil.copytree(REPOSITORY, source, ignore=ignored)
    assert not [path for path in source.rglob("*") if path.is_symlink()], (
        "Windows makes files of links"
    )
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index")
    built = run_python("-m", "pip", "wheel", *options, "--wheel-dir", str(place), str(source))
    assert built.returncode == 0, built.stderr
    (wheel,) = place.glob("*.whl")
    site = place / "site"
    zipfile.ZipFile(wheel).extractall(site)
    for name in (*PARTS, "vllm"):
        (site / name).mkdir()  # an error if the wheel has brought one
        (site / name / "__init__.py").write_text(f"OWNER = 'another {name}'\n")
    return site


def test_the_wheel_takes_no_name_but_edge(site: Path) -> None:
    code = (
        "import demos, kernels, offload, partition, transport, vllm, transformers\n"
        "import edge.kernels\n"
        "print(kernels.OWNER, edge.kernels.__file__)"
    )
    result = run_python("-c", code, cwd=site)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == f"another kernels {site / 'edge' / 'kernels' / '__init__.py'}"


def test_the_wheel_has_every_folder_with_code_but_benches(site: Path) -> None:
    found = {
        ".".join(("edge",) * (top in PARTS) + file.parent.relative_to(REPOSITORY).parts)
        for top in ("edge", *PARTS)
        for file in (REPOSITORY / top).rglob("*.py")
    }
    installed = {
        ".".join(file.parent.relative_to(site).parts) for file in site.glob("edge/**/*.py")
    }
    assert installed == {name for name in found if not name.startswith(NOT_IN_WHEEL)}


def test_the_wheel_has_the_demos_and_no_bench(site: Path) -> None:
    demos = site / "edge" / "demos"
    assert (demos / "model" / "config.json").is_file()
    assert not (demos / "bench").exists()
    code = (
        "from importlib import import_module\n"
        "from edge.demos.catalogue import DEMOS\n"
        "for demo in DEMOS: import_module(f'edge.demos.{demo.name}')"
    )
    result = run_python("-c", code, cwd=site, PYTHONPATH=str(site))
    assert result.returncode == 0, result.stderr


def test_the_wheel_runs_there(site: Path, tmp_path: Path) -> None:
    place = {"EDGE_CACHE": str(tmp_path), "PYTHONPATH": str(site)}
    model = str(site / "edge" / "demos" / "model")
    question = ("-p", "Where does the cat live?", "--local", "1")
    elsewhere = tmp_path / "clone"  # what is called edge here is another one
    (elsewhere / "edge").mkdir(parents=True)
    (elsewhere / "edge" / "__init__.py").write_text("raise SystemExit('not this one')")
    shown = run_python("-m", "edge", "inspect", model, cwd=site, **place)
    assert shown.returncode == 0, shown.stderr
    result = run_python("-P", "-m", "edge", "run", model, *question, cwd=elsewhere, **place)
    assert result.returncode == 0, result.stderr
    assert "In the barn." in result.stdout


@pytest.mark.parametrize("name", edge.__all__)
def test_the_public_name_imports(name: str) -> None:
    assert getattr(edge, name) is not None


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Clutser'"):
        _ = edge.Clutser  # type: ignore[attr-defined]
