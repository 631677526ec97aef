"""`edge models`: the models that are here, whether they fit the peers, and what is remembered."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from demos.bundled import MODEL
from edge.api.cluster import Cluster
from edge.host.cache_paths import CACHE_VARIABLE
from edge.planning.rate_words import rate_in_words
from tests.support import gguf_bytes
from tests.support.model_folders import add_to_cache, files_of
from tests.support.processes import cluster_of_daemons, edge


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of Hugging Face, and one of Edge's own that has measured nothing."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "own"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    add_to_cache(tmp_path / "hub", "org/tiny", files_of(MODEL))
    add_to_cache(tmp_path / "hub", "org/begun", {"config.json": b"{}"})
    quants = {f"tiny-{name}.gguf": gguf_bytes.sound({}) for name in ("Q4_0", "F16")}
    add_to_cache(tmp_path / "hub", "org/quants", quants)
    return tmp_path / "hub"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with cluster_of_daemons(tmp_path / "daemons", (), ()) as cluster:
        yield cluster


def listed(*arguments: object) -> dict[str, Any]:
    outcome = edge("models", "--json", *arguments)
    assert outcome.code == 0, outcome.err
    found: dict[str, Any] = json.loads(outcome.out)
    return found


def by_name(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in found["models"]}


def test_what_is_here_without_any_peer(hub: Path, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    shutil.copytree(MODEL, folder / "plain")
    (folder / "broken.gguf").write_bytes(b"GGUF")
    (folder / "notes.txt").write_text("hi")
    models = by_name(listed("--here", folder))
    tiny = models["org/tiny"]
    assert (tiny["family"], tiny["parameters"]) == ("llama", 1304192)
    assert tiny["problem"] is None
    assert tiny["fits_this_device"] is True
    assert tiny["fit"] is None
    assert tiny["stored_bytes"] < tiny["memory_bytes"]
    assert {"org/quants:Q4_0", "org/quants:F16"} <= models.keys()
    assert models["org/begun"]["problem"].endswith("name a model's repository")
    assert models["org/begun"]["path"] is None
    assert models[str(folder / "plain")]["family"] == "llama"
    assert models[str(folder / "broken.gguf")]["problem"]
    assert len(models) == 6
    shown = edge("models", "--here", folder)
    assert "org/quants:Q4_0" in shown.out
    assert "org/begun: " in shown.out
    assert not (tmp_path / "own").exists(), "looking makes nothing"


def test_on_a_cluster_nothing_is_measured_and_what_is_remembered_is_used(
    hub: Path, cluster: Cluster, tmp_path: Path
) -> None:
    at = [word for peer in cluster.peers for word in ("--peer", peer.address)]
    before = listed(*at)
    fit = by_name(before)["org/tiny"]["fit"]
    assert fit["problem"] is None
    assert fit["devices"]
    assert fit["tokens_per_s"] is None
    assert fit["tokens_per_s_range"] is None
    assert before["kept"] == []
    assert not (tmp_path / "own" / "measured").exists()
    assert "edge plan MODEL" in edge("models", *at).out

    path = by_name(before)["org/tiny"]["path"]
    cluster.propose(path)  # measures
    with cluster.load(path):
        pass
    after = listed(*at)
    fit = by_name(after)["org/tiny"]["fit"]
    low, high = fit["tokens_per_s_range"]
    assert 0 < low <= fit["tokens_per_s"] <= high
    assert {each["model"] for each in after["kept"]} == {"org/tiny"}
    assert {each["device"] for each in after["kept"]} <= {peer.name for peer in cluster.peers}
    shown = edge("models", *at).out
    assert f"{rate_in_words(fit['tokens_per_s'], (low, high))} tokens/s" in shown
    assert "of org/tiny" in shown


def test_no_peers_are_no_failure(hub: Path) -> None:
    found = listed("--peer", "127.0.0.1:1")
    assert "No peers were asked: " in found["note"]
    assert by_name(found)["org/tiny"]["fits_this_device"] is True


def test_who_has_no_peers_does_not_wait_long_for_them(hub: Path) -> None:
    found = listed("--cluster", "nobody-has-this-name", "--interface", "127.0.0.1")
    assert found["note"].startswith("No peers were asked: no peers found within 2 s by")
    assert "org/tiny" in by_name(found)


def test_no_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "own"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    assert edge("models", "--here").out.startswith("There is no model in the Hugging Face cache (")
    assert "is not there; give a model" in edge("models", "--here", tmp_path / "none").sentence()
