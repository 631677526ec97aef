"""An error of a disk names the variable that leads elsewhere, where a cache is meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge.errors import CheckpointError, RequestError
from edge.host.cache_paths import CACHE_VARIABLE
from edge.offload import disk_errors_as_store_errors
from edge.peer.resources import PeerResources
from edge.peer.settings import PeerSettings
from edge.weights.quantized_store import store_errors_as_edge_errors


def test_a_daemons_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shards").write_text("no folder")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    settings = PeerSettings(name="it", announce=False, cache_root=tmp_path, backend="null")
    with pytest.raises(RequestError, match="; EDGE_CACHE names another folder for caches"):
        PeerResources(settings, None)


@pytest.mark.parametrize("place", ["cache", "elsewhere"])
def test_rounded_weights(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    with (
        pytest.raises(CheckpointError, match="Permission denied") as caught,
        store_errors_as_edge_errors(),
        disk_errors_as_store_errors(tmp_path / place / "quantized"),
    ):
        raise PermissionError(13, "Permission denied")
    assert ("EDGE_CACHE" in str(caught.value)) == (place == "cache")
