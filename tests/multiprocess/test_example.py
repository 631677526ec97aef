"""A real daemon, and a model on it; CONTRIBUTING.md shows it."""

from collections.abc import Iterator

import pytest

import edge
from edge.demos.bundled import MODEL
from tests.support.processes import Daemon


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("attic"), "--no-announce", "--name", "attic") as daemon:
        yield daemon


def test_a_daemon_is_free_again_after_its_model_is_closed(daemon: Daemon) -> None:
    with edge.Cluster.connect([daemon.address]) as cluster, cluster.load(MODEL) as model:
        assert len(model.generate([1, 2, 3], max_new_tokens=2).token_ids) == 2
        assert len(daemon.describe().models) == 1
    assert daemon.await_free().models == ()
