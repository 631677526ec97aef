"""The back end that computes nothing gives a reply that tells whether all was there."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from edge.backends.interface import ShardWeights
from edge.backends.null.made_up import logits_after, replies
from edge.backends.null.program import Counts, NullProgram
from edge.backends.registry import open_backend
from edge.offload import Manifest, MemoryKVTier
from edge.protocol.step import Step, StepEntry, StepLimits
from edge.transport import Collective, WireRule
from edge.weights.formats import KvDtype
from edge.weights.layout import shard_layout
from tests.support.formats import uniform_format
from tests.support.plans import LAYOUTS, make_plan
from tests.support.specs import plain_layer, plain_spec, spec_of
from tests.support.transport_pairs import group, on_every_rank

SPEC = spec_of(
    [
        plain_layer(num_heads=6, num_kv_heads=kv_heads, head_size=size)
        for kv_heads, size in ((2, 8), (2, 8), (6, 16), (2, 8))
    ],
    hidden_size=48,
    vocab_size=60,
)
LIMITS = StepLimits(context_tokens=40, chunk_tokens=16, requests=2, cached_tokens=40)
PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)


def load(layout: str, *, stage: int, rank: int, kv_dtype: KvDtype = "float32") -> NullProgram:
    plan = make_plan(SPEC, layout, model="m")
    program = open_backend("null", threads=1).load(
        SPEC,
        shard_layout(SPEC, plan, stage=stage, rank=rank),
        ShardWeights(path=Path(), manifest=Manifest(tensors=(), total_bytes=7)),
        uniform_format("float32"),
        limits=LIMITS,
        kv_dtype=kv_dtype,
        kv_tier=MemoryKVTier(1 << 20),
    )
    assert isinstance(program, NullProgram)
    return program


def step(position: int, tokens: tuple[int, ...]) -> Step:
    entry = StepEntry(request="r", position=position, tokens=tokens, logit_rows=1)
    return Step(entries=(entry,))


@pytest.mark.parametrize("kv_dtype", ["float32", "int4"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_replies_do_not_depend_on_the_plan(layout: str, kv_dtype: KvDtype) -> None:
    """Also where sums are rounded, and requests are elsewhere between steps."""
    sizes = [len(shares.heads) for _layers, shares in LAYOUTS[layout]]
    with ExitStack() as stack:
        stages, members = [], []
        for number, size in enumerate(sizes):
            stages.append(
                [load(layout, stage=number, rank=r, kv_dtype=kv_dtype) for r in range(size)]
            )
            for program in stages[-1]:
                stack.callback(program.close)
            members.append(stack.enter_context(group("memory", size, rule=WireRule(format="int8"))))

        def forward(this: Step) -> int:
            hidden = None
            for programs, collectives in zip(stages, members, strict=True):

                def run(
                    member: Collective,
                    programs: list[NullProgram] = programs,
                    hidden: np.ndarray | None = hidden,
                ) -> np.ndarray:
                    found = programs[member.rank].forward(this, hidden, member).copy()
                    programs[member.rank].swap_out("r")
                    return found

                parts = on_every_rank(collectives, run)
                hidden = parts[0]
            return int(np.concatenate(parts, axis=-1)[0, -1].argmax())

        tokens = [*PROMPT, forward(step(0, PROMPT))]
        while len(tokens) < len(PROMPT) + 5:
            tokens.append(forward(step(len(tokens) - 1, (tokens[-1],))))
    assert tokens[len(PROMPT) :] == replies(SPEC, PROMPT, 5)


def test_a_token_depends_on_all_before_it_and_on_every_layer() -> None:
    found = {int(logits_after(SPEC, PROMPT).argmax())}
    for place in range(len(PROMPT)):
        other = [*PROMPT[:place], 50, *PROMPT[place + 1 :]]
        found.add(int(logits_after(SPEC, other).argmax()))
    found.add(int(logits_after(plain_spec(num_layers=3, hidden_size=48), PROMPT).argmax()))
    assert len(found) > len(PROMPT) // 2


def test_what_is_asked_of_it_is_counted() -> None:
    program = load("solo", stage=0, rank=0)
    with group("memory", 1) as (alone,):
        program.forward(step(0, PROMPT), None, alone)
        program.stream(3)
        program.swap_out("r")
        program.forward(step(len(PROMPT), (7,)), None, alone)
    assert program.weight_bytes == 7
    assert program.counts == Counts(steps=2, tokens=9, streamed_layers=3, swapped_out=1)
    program.close()


@pytest.mark.parametrize("broken", ["keys", "values"])
def test_a_key_or_value_that_is_lost_changes_the_reply(broken: str) -> None:
    """Of any head, in any layer."""
    with group("memory", 1) as (alone,):
        for layer in range(SPEC.num_layers):
            for head in range(SPEC.attentions[layer].num_kv_heads):
                program = load("solo", stage=0, rank=0)
                program.forward(step(0, PROMPT), None, alone)
                rows = program.rows("r", 0, len(PROMPT))
                assert rows is not None
                kept = [each.copy() for each in rows]
                kept[2 * layer + (broken == "values")][head, 4] = 0.0
                program.put_rows("r", 0, kept)
                found = program.forward(step(len(PROMPT), (7,)), None, alone)
                assert not np.array_equal(found[0, 0], logits_after(SPEC, (*PROMPT, 7)))
                program.close()
