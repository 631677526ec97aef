"""A table of scheduling decisions; CONTRIBUTING.md shows it."""

import pytest

from edge.scheduling.residency import Residency
from tests.support.scheduling import Steps


@pytest.mark.parametrize(("chunk", "lengths"), [(4, [4, 2]), (8, [6])])
def test_a_prompt_is_computed_in_chunks(chunk: int, lengths: list[int]) -> None:
    room = Residency(memory_tokens=9, disk_tokens=0, longest_tokens=0, requests=1, quantum_tokens=1)
    steps = Steps(room, stages=1, chunk_tokens=chunk, logit_chunk_tokens=chunk)
    steps.add("a", [1, 2, 3, 4, 5, 6], new_tokens=1)
    found = [step for _ in lengths if (step := steps.decide().step)]
    assert [len(step.entries[0].tokens) for step in found] == lengths
