"""`edge cache` over real daemons: what they keep of which model, and removing it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from demos.bundled import MODEL
from edge.api.cluster import Cluster
from edge.host.cache_paths import CACHE_VARIABLE
from tests.support.model_folders import add_to_cache, files_of
from tests.support.processes import Daemon, edge


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "own"))
    return tmp_path / "own"


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path / "daemon", "--no-announce", "--name", "attic") as daemon:
        yield daemon


def shown(*arguments: str) -> list[dict[str, Any]]:
    outcome = edge("cache", "show", "--json", *arguments)
    assert outcome.code == 0, outcome.err
    found: list[dict[str, Any]] = json.loads(outcome.out)
    return found


def test_what_is_kept_of_a_model_and_removed(
    own_cache: Path, daemon: Daemon, tmp_path: Path
) -> None:
    snapshot = add_to_cache(tmp_path / "hub", "org/tiny", files_of(MODEL))
    at = ("--peer", daemon.address)
    with Cluster.connect(daemon.address) as cluster, cluster.load(snapshot) as model:
        model.generate("Once", max_new_tokens=1)
        there = [each for each in shown(*at) if each["device"] == "attic"]
        assert {(each["kind"], each["model"], each["in_use"]) for each in there} == {
            ("shards", "org/tiny", True)
        }
        busy = edge("cache", "clean", "--all", "--yes", *at)
        assert busy.code == 0, busy.err
        assert [each for each in shown(*at) if each["device"] == "attic"], "it is in use"
        assert model.generate("Once", max_new_tokens=1).token_ids
    daemon.await_free()
    with Cluster.connect(daemon.address) as cluster, cluster.load(snapshot):
        pass  # its rounded weights, which went, are made again
    daemon.await_free()
    here = {each["kind"]: each["model"] for each in shown() if each["device"] == "this device"}
    assert here["quantized"] == "org/tiny"

    looked = edge("cache", "clean", "--model", "org/tiny", "--dry-run", *at)
    assert "would be freed" in looked.out
    assert "attic" in looked.out
    assert "--yes" in edge("cache", "clean", "--model", "org/tiny", *at).err
    assert "org/tiny" in edge("cache", "show", *at).out
    gone = edge("cache", "clean", "--model", "org/tiny", "--yes", "--json", *at)
    removed = {(each["device"], each["kind"]) for each in json.loads(gone.out)["removed"]}
    assert removed == {("attic", "shards"), ("this device", "quantized")}
    assert not [each for each in shown(*at) if each["model"] == "org/tiny"]
    assert not list(daemon.shards.glob("[!.]*"))
    assert own_cache.is_dir()


def test_what_is_wrong_is_told(own_cache: Path) -> None:
    assert edge("cache", "clean").code == 2
    assert "is no age" in edge("cache", "clean", "--older-than", "soon").sentence()
    assert edge("cache", "show").out == "Nothing is kept.\n"
    assert edge("cache", "clean", "--all").out.startswith("0 B freed")
    assert not own_cache.exists(), "looking makes nothing"
