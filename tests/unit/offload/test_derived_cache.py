"""Files made from others: whole or not there, found by key, made again when the key changes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edge.offload import CachedShard, DerivedCache, StoreFullError
from edge.offload.cache.folder_cache import FolderCache


def fill(cache: DerivedCache, key: str, value: int) -> None:
    with cache.begin(key, 5000) as writer:
        writer.add("a", np.full(5000, value, np.uint8))
        writer.finish().close()


def test_is_found_again_by_its_key(tmp_path: Path) -> None:
    cache = DerivedCache(tmp_path, 1 << 20)
    assert cache.get("key") is None
    fill(cache, "key", 7)
    found = DerivedCache(tmp_path, 1 << 20).get("key")
    assert found is not None
    with found:
        assert found.path.read_bytes() == bytes([7]) * 5000
        assert [tensor.name for tensor in found.manifest.tensors] == ["a"]
    assert cache.get("other key") is None


def test_a_file_that_somebody_wrote_to_is_hashed_and_goes_if_it_is_another(tmp_path: Path) -> None:
    cache = DerivedCache(tmp_path, 1 << 20)
    fill(cache, "key", 7)
    (weights,) = tmp_path.rglob("weights")
    weights.write_bytes(bytes([7]) * 5000)
    found = cache.get("key")
    assert found is not None
    found.close()
    weights.write_bytes(bytes([7]) * 4999 + bytes([8]))
    assert cache.get("key") is None
    assert not weights.exists()


def test_what_was_not_finished_is_not_there(tmp_path: Path) -> None:
    cache = DerivedCache(tmp_path, 1 << 20)
    with cache.begin("key", 5000) as writer:
        writer.add("a", np.zeros(5000, np.uint8))
    assert cache.get("key") is None
    assert not list(tmp_path.rglob("*.partial"))


def test_drafts_of_a_process_that_died_are_removed(tmp_path: Path) -> None:
    cache = DerivedCache(tmp_path, 1 << 20)
    fill(cache, "key", 1)
    (folder,) = (path.parent for path in tmp_path.rglob("weights"))
    (folder / "dead.partial").write_bytes(b"x" * 100)
    cache.discard("key")
    (tmp_path / folder.name).mkdir()
    (tmp_path / folder.name / "dead.partial").write_bytes(b"x" * 100)
    fill(cache, "key", 2)
    assert not list(tmp_path.rglob("*.partial"))


def test_drafts_are_removed_at_the_start_unless_their_folder_is_in_use(tmp_path: Path) -> None:
    cache = DerivedCache(tmp_path, 1 << 20)
    fill(cache, "key", 1)
    (folder,) = (path.parent for path in tmp_path.rglob("weights"))
    (folder / "dead.partial").write_bytes(b"x" * 100)
    with cache.begin("other key", 5000) as writer:
        writer.add("a", np.zeros(5000, np.uint8))
        DerivedCache(tmp_path, 1 << 20)
        (living,) = tmp_path.rglob("*.partial")
        assert living.parent != folder
        writer.finish().close()
    found = cache.get("other key")
    assert found is not None
    found.close()


def test_a_file_of_another_size_is_thrown_away(tmp_path: Path) -> None:
    cache = DerivedCache(tmp_path, 1 << 20)
    fill(cache, "key", 1)
    (path,) = tmp_path.rglob("weights")
    path.write_bytes(b"short")
    assert cache.get("key") is None
    assert not path.exists()
    fill(cache, "key", 2)
    found = cache.get("key")
    assert found is not None
    found.close()


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    cache = DerivedCache(tmp_path, 12_000)
    for key in ("first", "second", "third"):
        fill(cache, key, 1)
    assert cache.get("first") is None
    kept = cache.get("third")
    assert kept is not None
    kept.close()


def test_no_room_is_said(tmp_path: Path) -> None:
    with pytest.raises(StoreFullError, match="raise the limit"):
        DerivedCache(tmp_path, 100).begin("key", 5000)
    assert not list(tmp_path.rglob("weights"))


def test_what_is_made_of_one_owners_folders_has_a_limit(tmp_path: Path) -> None:
    """Their own copies go, those of others do not; and none that is in use."""
    shards = FolderCache(tmp_path / "shards", 1 << 20)
    with shards.locked():
        for owner in ("one", "other"):
            shards.use(owner).close()
            shards.set_owner(owner, owner, 5)
    cache = DerivedCache(tmp_path / "packed", 1 << 20, owner_limit_bytes=10_000)

    def make(key: str, owner: str) -> CachedShard:
        with cache.begin(key, 4000, made_of=tmp_path / "shards" / owner) as writer:
            writer.add("tensor", np.zeros(1000, np.float32))
            return writer.finish()

    def kept() -> str:
        found = []
        for key in "abcdef":
            shard = cache.get(key)
            if shard is not None:
                found.append(key)
                shard.close()
        return "".join(found)

    make("a", "other").close()
    make("b", "one").close()
    make("c", "one").close()
    assert kept() == "abc"
    with make("d", "one"):
        assert kept() == "acd", "the least recently used of this owner"
        with make("e", "one"), make("f", "one"):
            assert kept() == "adef", "who needs more at once has it"
