"""A process may have as many descriptors as it needs, where the system lets it."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest

from edge.system.descriptors import allow_descriptors


@pytest.fixture
def limits() -> Iterator[tuple[int, int]]:
    """Soft and hard; what they were comes back."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(("soft", "wanted", "then"), [(500, 700, 700), (800, 700, 800)])
def test_the_limit_is_raised_and_never_lowered(
    limits: tuple[int, int], soft: int, wanted: int, then: int
) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, limits[1]))
    assert allow_descriptors(wanted) == wanted
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (then, limits[1])


def test_more_than_the_system_allows_is_not_asked_for(limits: tuple[int, int]) -> None:
    _, hard = limits
    resource.setrlimit(resource.RLIMIT_NOFILE, (500, hard))
    assert allow_descriptors(hard + 1) == hard
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
