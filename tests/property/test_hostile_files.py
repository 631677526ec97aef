"""Whatever a file holds, it is read, or the project's own errors say why not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.mutated_files import Files


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("files"))


@pytest.fixture(autouse=True)
def closed_afterwards(files: Files) -> Iterator[None]:
    """Another test opens it again."""
    yield
    files.close()


def test_sound_files_are_read(files: Files) -> None:
    for kind in files.kinds.values():
        for each in (kind.sound, *kind.others):
            kind.read(each)


def test_files_that_once_showed_more_are_read_or_refused(files: Files) -> None:
    found = [files.outcome(*each) for each in files.kept]
    assert found
    assert all(each.endswith(("read", "refused")) for each in found)


@settings(max_examples=250, deadline=None)
@given(seed=st.integers(0, 2**64))
def test_changed_files_are_read_or_refused(files: Files, seed: int) -> None:
    assert files.try_one(seed).endswith(("read", "refused"))
