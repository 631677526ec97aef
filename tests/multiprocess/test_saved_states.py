"""Models whose layers have states, or keep the newest tokens only: prompts that begin alike go on
from saved ones, on any plan, and no bit is another for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

import edge
from edge.weights.formats import KvDtype
from tests.support.checkpoints import TinyCheckpoint
from tests.support.plans import make_plan
from tests.support.replies import streams_at_once
from tests.support.slow_cases import shown_in_parts

CONTEXT = 480
OPTIONS = edge.GenerationOptions(
    max_new_tokens=20, temperature=1.5, seed=7, ignore_eos=True, logprobs=3
)

LIKE_OTHERS = shown_in_parts("multiprocess/test_saved_states.py", "e2e/test_more_families.py")
"""Of models whose layers are of kinds that another model of the cases has."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[edge.Cluster]:
    with edge.Cluster.local(peers=3, threads=1) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def others() -> Iterator[edge.Cluster]:
    """Peers that have kept nothing of what the first have computed."""
    with edge.Cluster.local(peers=3, threads=1) as cluster:
        yield cluster


@pytest.mark.parametrize(
    ("family", "layout", "kv_dtype"),
    [
        ("qwen3_5", "tensor_3", "float32"),
        ("gemma3", "pipeline_2", "float32"),
        ("lfm2", "pipeline_2", "float32"),
        ("llama", "solo", "int4"),
        ("gpt_oss", "solo", "int8"),
        *(
            pytest.param(*case, marks=LIKE_OTHERS)
            for case in (
                ("qwen3_next", "pipeline_2", "float32"),
                ("qwen3_5_moe", "solo", "float32"),
                ("olmo3", "tensor_2", "float32"),
            )
        ),
    ],
)
def test_prompts_that_begin_alike_go_on_from_saved_states(
    cluster: edge.Cluster,
    others: edge.Cluster,
    tiny_checkpoint: Callable[..., TinyCheckpoint],
    family: str,
    layout: str,
    kv_dtype: KvDtype,
) -> None:
    """A turn that repeats the prompt, one that repeats the answer as well, and prompts that part
    from an old one in its middle: the first finds nothing and the next one does. Later sessions
    find what was saved as well."""
    checkpoint = tiny_checkpoint(family)
    plan = make_plan(checkpoint.spec, layout, model=checkpoint.path.name)
    first, second, third = (tuple(checkpoint.prompt(count)) for count in (300, 41, 50))

    def load(cluster: edge.Cluster = cluster) -> edge.Model:
        return cluster.load(
            checkpoint.path,
            dtype="float32",
            plan=plan,
            context_tokens=CONTEXT,
            concurrency=4,  # saved windows are in memory that requests leave free
            kv_dtype=kv_dtype,
        )

    def found(reply: edge.Reply) -> int:
        return int(reply.statistics["found_tokens"])

    with load() as model:
        assert found(model.generate(first, OPTIONS)) == 0
        turn = first + second
        again = model.generate(turn, OPTIONS)
        assert found(again) == 296
        whole = turn + again.token_ids + third
        assert found(model.generate(whole, OPTIONS)) == len(turn) + 20 - 1
        parting = [first[:200] + each for each in (third, second)]
        assert found(model.generate(parting[0], OPTIONS)) == 0
        shared = model.generate(parting[1], OPTIONS)
        assert found(shared) == 200
    for prompt, reply in ((turn, again), (parting[1], shared)):
        with load() as model, load(others) as other:
            later, anew = model.generate(prompt, OPTIONS), other.generate(prompt, OPTIONS)
        assert found(later) >= 200
        assert found(anew) == 0
        for each in (later, anew):
            assert each.token_ids == reply.token_ids
            assert (each.logprobs, each.top_logprobs) == (reply.logprobs, reply.top_logprobs)


@pytest.mark.parametrize("family", ["qwen3_5", "gemma3"])
def test_requests_with_one_beginning_compute_it_once(
    tiny_checkpoint: Callable[..., TinyCheckpoint], family: str
) -> None:
    """They come at the same time, and more of them than have states at once. Tokens are those of
    transformers."""
    checkpoint = tiny_checkpoint(family)
    beginning = checkpoint.prompt(301)
    prompts = [[*beginning, *[(number + 1) * 7 % 50 + 3] * (5 + number)] for number in range(6)]
    with (
        edge.Cluster.local(peers=1, threads=1) as cluster,
        cluster.load(
            checkpoint.path, dtype="float32", context_tokens=CONTEXT, concurrency=4
        ) as model,
    ):
        streams = streams_at_once(model, prompts, [12] * len(prompts))
        answers = [[token.token_id for token in stream] for stream in streams]
        found = [stream.reply().statistics["found_tokens"] for stream in streams]
    for prompt, answer in zip(prompts, answers, strict=True):
        checkpoint.check_greedy(prompt, answer, 12)
    assert found == [0, *[300] * 5]
