"""What caches on disk hold, by model and age, and what may be removed of it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from edge.errors import RequestError
from edge.memory.disk_cache import (
    OF_PEERS,
    kept_files,
    remove_kept,
    remove_unfinished,
    unfinished_downloads,
)
from edge.offload import FolderCache, note_model
from edge.weights.writer_lock import only_writer

DAY_S = 86400.0
MINE, OTHERS = "a" * 32, "b" * 32


def add(
    root: Path, kind: str, name: str, *, model: str | None, age_s: float, owner: str = ""
) -> None:
    folders = FolderCache(root / kind, 1 << 40)
    with folders.locked(), folders.use(name) as use:
        (use.folder / "weights").write_bytes(bytes(10_000))
        if model is not None:
            note_model(use.folder, model)
        if owner:
            folders.set_owner(name, owner, 10_000)
    then_s = time.time() - age_s
    os.utime(root / kind / name / ".lock", (then_s, then_s))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    add(tmp_path, "shards", "one", model="org/one", age_s=40 * DAY_S, owner=MINE)
    add(tmp_path, "shards", "two", model="org/two", age_s=2 * DAY_S, owner=OTHERS)
    add(tmp_path, "packed", "p", model="org/one", age_s=39 * DAY_S, owner=MINE)
    add(tmp_path, "quantized", "q", model=None, age_s=DAY_S)
    (tmp_path / "measured" / "links").mkdir(parents=True)
    (tmp_path / "measured" / "links" / "x.json").write_text("{}")
    (tmp_path / "of somebody else").mkdir()
    return tmp_path


def test_what_is_kept_the_oldest_first(root: Path) -> None:
    found = kept_files(root)
    assert [(each.name, each.model) for each in found] == [
        ("shards/one", "org/one"),
        ("packed/p", "org/one"),
        ("shards/two", "org/two"),
        ("quantized/q", None),
        ("measured/", None),
    ]
    assert all(each.bytes > 0 and not each.in_use for each in found)
    assert all(each.bytes >= 10_000 for each in found[:4])
    assert 39.9 * DAY_S < found[0].unused_s < 40.1 * DAY_S
    assert kept_files(root / "nothing") == ()


def test_what_is_in_use_stays(root: Path) -> None:
    folders = FolderCache(root / "shards", 1 << 40)
    with folders.locked():
        use = folders.use("two")
    with use:
        assert [each.in_use for each in kept_files(root, kinds=["shards"])] == [False, True]
        remove_kept(root, ["shards/one", "shards/two"])
        assert [each.name for each in kept_files(root, kinds=["shards"])] == ["shards/two"]
    remove_kept(root, ["shards/two"])
    assert kept_files(root, kinds=["shards"]) == ()


def test_another_device_sees_and_removes_what_it_sent(root: Path) -> None:
    found = kept_files(root, kinds=OF_PEERS, user=MINE)
    assert [(each.name, each.model) for each in found] == [
        ("shards/one", "org/one"),
        ("packed/p", "org/one"),
        ("shards/of other devices", None),
    ]
    assert found[-1].bytes == next(each.bytes for each in kept_files(root) if "two" in each.name)
    remove_kept(root, [each.name for each in kept_files(root)], kinds=OF_PEERS, user=MINE)
    assert [each.name for each in kept_files(root)] == ["shards/two", "quantized/q", "measured/"]


@pytest.mark.parametrize(
    "name", ["", "shards", "shards/", "shards/../quantized/q", "other/one", "quantized/../measured"]
)
def test_names_that_are_none_remove_nothing(root: Path, name: str) -> None:
    before = [each.name for each in kept_files(root)]
    remove_kept(root, [name])
    assert [each.name for each in kept_files(root)] == before
    assert (root / "of somebody else").is_dir()


def test_all_of_it(root: Path) -> None:
    remove_kept(root, [each.name for each in kept_files(root)])
    assert kept_files(root) == ()
    assert (root / "of somebody else").is_dir()


def test_names_are_shown_and_do_nothing(tmp_path: Path) -> None:
    add(tmp_path, "shards", "x", model="evil\x1b[2J" + "y" * 3000, age_s=0)
    (found,) = kept_files(tmp_path)
    assert found.model is not None
    assert found.model.startswith("evil\\x1b[2J")
    assert len(found.model) < 600


def test_downloads_that_were_not_finished(tmp_path: Path) -> None:
    blobs = tmp_path / "models--org--name" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "abc.edge-unfinished").write_bytes(bytes(5000))
    (blobs / "whole").write_bytes(bytes(5000))
    (found,) = unfinished_downloads(tmp_path)
    assert (found.model, found.in_use) == ("org/name", False)
    with only_writer(blobs, lambda: None):
        assert [each.in_use for each in unfinished_downloads(tmp_path)] == [True]
        remove_unfinished(tmp_path, [found.name])
    assert [each.name for each in unfinished_downloads(tmp_path)] == [found.name]
    remove_unfinished(tmp_path, [found.name, "downloads/models--org--name/blobs/whole"])
    assert not list(unfinished_downloads(tmp_path))
    assert (blobs / "whole").exists()


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / ".lock").mkdir()
    with pytest.raises(RequestError, match="shards"):
        kept_files(tmp_path)
