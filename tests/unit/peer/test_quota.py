"""What is held is counted by owner, and refused in words."""

from __future__ import annotations

import pytest

from edge.errors import CapacityError
from edge.peer.quota import Quota


def test_one_owner_and_all_have_limits() -> None:
    quota = Quota("cups", of_one=2, of_all=3)
    quota.take("a", 2)
    with pytest.raises(CapacityError, match="one coordinator may have 2 cups"):
        quota.take("a")
    quota.take("b")
    with pytest.raises(CapacityError, match="at most 3 cups"):
        quota.take("b")
    quota.give_back("a")
    quota.take("b")
    assert quota.held == 3
    quota.give_back_all("a")
    quota.give_back_all("b")
    quota.give_back_all("nobody")
    assert quota.held == 0
