"""Every bundled demo runs away from the checkout, as an installed `edge demo NAME` would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from edge.demos.bundled import MODEL, require
from edge.demos.catalogue import DEMOS
from tests.support.processes import PATIENCE_S
from tests.support.slow_cases import shown_in_parts

REPOSITORY = Path(__file__).parents[2]


def edge(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """How fast the peers are is known: it changes no claim. `.ci/run` has them measured."""
    return subprocess.run(
        [sys.executable, "-m", "tests.support.known_rates", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


SHOWN = {
    "quickstart": "Where does the cat live? In the barn.",
    "split": "Every token passed through all 3 of them",
    "uneven": "the same as from one peer alone",
    "mixed": "the same as from one peer alone",
    "bigger": "the same as with the whole model in memory",
    "survive": "300 tokens, the same as without the loss",
    "page": "read all of them right",
    "voice": "400 results in order, the same as without the loss",
    "branches": "the same as on one device",
    "zeroconf": "found: attic at 127.0.0.1:",
}


PARTS = {
    "split": ("e2e/test_bundled_model.py",),
    "uneven": ("e2e/test_exactness_quantized.py",),
    "mixed": ("e2e/test_triton_peers.py",),
    "bigger": ("multiprocess/test_streaming.py",),
    "survive": ("multiprocess/test_lost_peers.py",),
    "page": ("unit/runs/test_graphs.py",),
    "voice": ("unit/runs/test_graph_sequences.py",),
    "branches": ("unit/runs/test_graphs.py",),
    "zeroconf": ("multiprocess/test_finding_daemons.py",),
}
"""Tests of what these show."""


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        pytest.param(name, shown, marks=shown_in_parts(*PARTS[name]) if name in PARTS else ())
        for name, shown in SHOWN.items()
    ],
)
def test_the_demo_shows_what_it_claims(name: str, shown: str, tmp_path: Path) -> None:
    result = edge("demo", name, cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert shown in result.stdout
    assert result.stderr == ""
    assert not list(tmp_path.iterdir())
    if name == "quickstart":  # six tokens are shown without a rate
        assert "tokens (stop), the first after " in result.stdout
        assert "tok/s" not in result.stdout


def test_every_demo_is_listed_and_tested(tmp_path: Path) -> None:
    result = edge("demo", cwd=tmp_path)
    listed = [line.split(maxsplit=1) for line in result.stdout.splitlines()]
    assert listed == [[demo.name, demo.summary] for demo in DEMOS]
    assert list(SHOWN) == [demo.name for demo in DEMOS]


def test_an_unknown_demo_is_named_with_those_there_are(tmp_path: Path) -> None:
    result = edge("demo", "splitt", cwd=tmp_path)
    assert result.returncode == 1
    assert result.stderr.startswith("edge: there is no demo 'splitt'; there are quickstart, ")


def test_a_claim_that_does_not_hold_ends_the_demo_with_a_sentence() -> None:
    require(True, "never said")
    with pytest.raises(SystemExit, match="demo failed: the sky is green"):
        require(False, "the sky is green")


def test_the_model_is_part_of_the_package() -> None:
    assert {file.name for file in MODEL.iterdir()} >= {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
