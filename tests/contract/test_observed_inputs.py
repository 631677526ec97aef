"""What products are given on a GPU, or interpreted, against the inputs of plain numpy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edge.errors import RequestError
from edge.weights import observation
from edge.weights.layout import shard_layout
from tests.support.checkpoints import TinyCheckpoint
from tests.support.plans import make_plan
from tests.support.program_contract import LIMITS as MADE_UP_LIMITS
from tests.support.program_contract import Kind
from tests.support.reference_model import ObservedInputs, uses_by_transformers
from tests.support.triton_shards import LIMITS, chunk, triton_plan

Checkpoints = Callable[..., TinyCheckpoint]

LARGEST_DIFFERENCE = 1e-4


@pytest.mark.parametrize(
    ("family", "layout", "streamed"),
    [("qwen3", "pipeline_2", 0), ("llama_with_biases", "tensor_3", 0), ("mistral", "solo", 1)],
)
def test_inputs_are_summed_up(
    tiny_checkpoint: Checkpoints,
    family: str,
    layout: str,
    streamed: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a chunk that wants no logits, of one that does, and of a token after them."""
    monkeypatch.setattr(observation, "RUN_COLUMNS", 24)
    checkpoint = tiny_checkpoint(family, layers=2, heads=(4, 2))
    tokens = checkpoint.prompt(9)
    expected = ObservedInputs(checkpoint, [tokens])
    limits = replace(LIMITS, observes=True)
    plan = make_plan(checkpoint.spec, layout, model="m")
    count = 0
    with triton_plan(checkpoint, layout, tmp_path, limits=limits, streamed=streamed) as model:
        model.forward(chunk("a", tokens[:5], rows=0))
        model.forward(chunk("a", tokens[5:8], 5))
        model.forward(chunk("a", tokens[8:], 8))
        for stage, programs in enumerate(model.programs):
            for rank, program in enumerate(programs):
                layout_of = shard_layout(checkpoint.spec, plan, stage=stage, rank=rank)
                for number, run in enumerate(observation.observed_inputs(layout_of)):
                    difference = expected.difference(run, program.gram(number))
                    assert difference <= LARGEST_DIFFERENCE, run
                    count += 1
    assert count > 2 * 5, "several runs of a matrix"


@pytest.mark.parametrize("layout", ["tensor_2", "whole tensor_2"])
def test_it_is_counted_who_goes_through_which_expert(
    tiny_checkpoint: Checkpoints, layout: str, tmp_path: Path
) -> None:
    """By places: experts that are whole stand in the order of the shards."""
    checkpoint = tiny_checkpoint("mixtral", layers=1)
    tokens = checkpoint.prompt(9)
    plan = make_plan(checkpoint.spec, layout, model="m")
    order = [number for each in plan.stages[0].slices for number in (each.experts or [()])[0]]
    expected = np.asarray(uses_by_transformers(checkpoint, [tokens], 0))
    limits = replace(LIMITS, observes=True)
    with triton_plan(checkpoint, layout, tmp_path, limits=limits) as model:
        model.forward(chunk("a", tokens[:8]))
        model.forward(chunk("a", tokens[8:], 8))
        for program in model.programs[0]:
            assert program.gram(0).tolist() == expected[order or slice(None)].tolist()


def test_a_back_end_that_computes_nothing_observes_nothing(tmp_path: Path) -> None:
    limits = replace(MADE_UP_LIMITS, observes=True)
    with (
        pytest.raises(RequestError, match="has nothing to observe"),
        Kind("null", tmp_path).program(limits=limits),
    ):
        pass
