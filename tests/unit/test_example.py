"""A test of a pure function; CONTRIBUTING.md shows it."""

import pytest

from edge.host.free_memory import format_size


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 << 39, "1.5 TiB")]
)
def test_sizes_are_shown_in_binary_units(size: int, text: str) -> None:
    assert format_size(size) == text
