"""Which models a text is not read for, to round them by."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from edge.errors import RequestError
from edge.planning.load_options import LoadOptions
from edge.studies.observe import observation_of
from edge.weights.checkpoint import Checkpoint
from tests.support.checkpoints import TinyCheckpoint


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("gemma4_moe", "has experts"),
        ("gemma4_small", "has layers with inputs of each token, or with keys of other layers"),
        ("qwen3_5", "has layers with states"),
    ],
)
def test_what_is_not_observed(
    tiny_checkpoint: Callable[..., TinyCheckpoint], family: str, reason: str
) -> None:
    with (
        Checkpoint.open(tiny_checkpoint(family).path) as checkpoint,
        pytest.raises(RequestError, match=f"{reason}.* load it with dtype int4"),
    ):
        observation_of(checkpoint, LoadOptions(), text=None, windows=1, window_tokens=16)
