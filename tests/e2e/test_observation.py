"""What products are given over real daemons, against the inputs of plain numpy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

import edge
from edge.partition import Plan
from edge.planning.load_options import CHUNK_TOKENS, LoadOptions
from edge.weights.layout import shard_layout, whole_layout
from edge.weights.observation import RUN_COLUMNS, ObservedRun, observed_inputs
from tests.support.checkpoints import TinyCheckpoint
from tests.support.family_sizes import FAMILIES
from tests.support.plans import make_plan, streaming
from tests.support.reference_model import Array, ObservedInputs
from tests.support.slow_cases import repeats_are_slow

LARGEST_DIFFERENCE = 1e-4
ANSWER_TOKENS = 3
LONG = (CHUNK_TOKENS + 44, 5)
"""Read in two chunks; a split stage computes the first in halves, and no logits of it."""
Checkpoints = Callable[..., TinyCheckpoint]


@pytest.mark.parametrize(
    ("name", "layout", "streamed", "lengths"),
    repeats_are_slow(
        [
            ("larger_llama", "solo", 0, (9, 21)),
            ("larger_llama", "mixed_2_then_3", 0, (9, 21)),
            ("larger_llama", "pipeline_2", 2, (9, 21)),
            *((family, "tensor_3", 0, (9, 21)) for family in FAMILIES),
            *(
                ("larger_llama", layout, 0, LONG)
                for layout in ("solo", "tensor_2", "mixed_2_then_3")
            ),
        ],
        of=(1, 2, 3),
    ),
)
@pytest.mark.linux_ways
def test_inputs_are_summed_up_by_every_plan(
    five_peers: edge.Cluster,
    tiny_checkpoint: Checkpoints,
    name: str,
    layout: str,
    streamed: int,
    lengths: tuple[int, ...],
) -> None:
    """Of prompts in chunks and of tokens after them, of several requests at once."""
    checkpoint = tiny_checkpoint(name)
    plan = make_plan(checkpoint.spec, layout, model=checkpoint.path.name)
    plan = streaming(plan, streamed)
    prompts = [checkpoint.prompt(length) for length in lengths]

    async def observe() -> tuple[list[list[int]], dict[ObservedRun, Array]]:
        options = LoadOptions(
            dtype="float32",
            plan=plan,
            observes=True,
            context_tokens=max(lengths) + ANSWER_TOKENS,
            concurrency=2,
        )
        async with (
            await edge.AsyncCluster.connect(five_peers.peers) as cluster,
            await cluster.load(checkpoint.path, options) as model,
        ):
            replies = await asyncio.gather(
                *(model.generate(each, max_new_tokens=ANSWER_TOKENS) for each in prompts)
            )
            grams = {}
            async for run, gram in model._observed(checkpoint.spec):
                assert isinstance(run, ObservedRun)
                grams[run] = gram
        return [list(reply.token_ids) for reply in replies], grams

    answers, grams = asyncio.run(observe())
    # Nothing follows the last token of a reply, so it is not computed with.
    told = [[*prompt, *answer[:-1]] for prompt, answer in zip(prompts, answers, strict=True)]
    expected = ObservedInputs(checkpoint, told)
    assert tuple(grams) == observed_inputs(whole_layout(checkpoint.spec))
    for run, gram in grams.items():
        for part, number in parts_of(checkpoint, plan, run):
            difference = expected.difference(number, gram[part, part])
            assert difference <= LARGEST_DIFFERENCE, (run, number)


def parts_of(
    checkpoint: TinyCheckpoint, plan: Plan, whole: ObservedRun
) -> list[tuple[slice, ObservedRun]]:
    """The runs that shards have of one of the whole model, and where they are in it."""
    found = []
    for stage in range(len(plan.stages)):
        for rank in range(len(plan.stages[stage].shards)):
            layout = shard_layout(checkpoint.spec, plan, stage=stage, rank=rank)
            for run in observed_inputs(layout):
                if run.matrix == whole.matrix and run.columns.start in whole.columns:
                    start = run.columns.start - whole.columns.start
                    found.append((slice(start, start + len(run.columns)), run))
    assert {column for _, run in found for column in run.columns} == set(whole.columns)
    return found


def test_runs_are_of_whole_blocks(tiny_checkpoint: Checkpoints) -> None:
    spec = tiny_checkpoint("larger_llama").spec
    down = [run.columns for run in observed_inputs(whole_layout(spec)) if "down" in run.matrix]
    assert down[:2] == [range(RUN_COLUMNS), range(RUN_COLUMNS, 704)]


def test_what_is_not_observed_is_not_told(
    five_peers: edge.Cluster, tiny_checkpoint: Checkpoints
) -> None:
    checkpoint = tiny_checkpoint("llama")
    plan = make_plan(checkpoint.spec, "solo", model=checkpoint.path.name)
    options = LoadOptions(dtype="float32", plan=plan)

    async def ask(options: LoadOptions) -> None:
        async with (
            await edge.AsyncCluster.connect(five_peers.peers) as cluster,
            await cluster.load(checkpoint.path, options) as model,
        ):
            if options.observes:
                count = len(observed_inputs(whole_layout(checkpoint.spec)))
                await model._held.running.observed((0, 0), count, (8, 8))
            else:
                await anext(model._observed(checkpoint.spec))

    for each in (options, replace(options, observes=True)):
        with pytest.raises(edge.EdgeError, match="of inputs is not observed"):
            asyncio.run(ask(each))
