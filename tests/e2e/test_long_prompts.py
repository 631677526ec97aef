"""Prompts of many chunks give on several devices what they give on one, and in `transformers`.

Windows end long before, states are carried far, positions are late.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import edge
from tests.support.long_prompts import FAMILIES, check_long_prompt


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_to_long_prompts_are_the_same_everywhere(
    five_peers: edge.Cluster, tmp_path: Path, family: str
) -> None:
    check_long_prompt(five_peers, tmp_path, family, 1_000)
