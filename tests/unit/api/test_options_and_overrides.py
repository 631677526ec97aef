"""What a caller may name in `load` and `generate` is what the options have, in name and type."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any, get_type_hints

import pytest

import edge
from edge.answers.terms import GenerationOptions, GenerationOverrides
from edge.kernels.sampling.parameters import SamplingParameters
from edge.planning.load_options import LoadOptions, LoadOverrides


@pytest.mark.parametrize(
    ("options", "overrides", "set_elsewhere"),
    [
        (LoadOptions, LoadOverrides, {"observes", "keeps_all_tokens", "packs_blocks"}),
        (GenerationOptions, GenerationOverrides, set()),
    ],
)
def test_overrides_are_the_fields(options: Any, overrides: Any, set_elsewhere: set[str]) -> None:
    hints = get_type_hints(options)
    assert get_type_hints(overrides) == {
        each.name: hints[each.name] for each in fields(options) if each.name not in set_elsewhere
    }
    assert not overrides.__required_keys__


def test_every_public_name_is_there() -> None:
    for name in edge.__all__:
        assert getattr(edge, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        _ = edge.Nonsense  # type: ignore[attr-defined]


MODEL: Any = object.__new__(edge.Model)
ASYNC_MODEL: Any = object.__new__(edge.AsyncModel)
CLUSTER: Any = object.__new__(edge.Cluster)
ASYNC_CLUSTER: Any = object.__new__(edge.AsyncCluster)
ANY: Any = edge


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ANY.Cluster.local(peer=2), "Cluster.local has no 'peer'; do you mean peers?"),
        (lambda: ANY.Cluster.local(2, thread=1), "do you mean threads?"),
        (
            lambda: ANY.Cluster.discover(timeout=1),
            "discover has no 'timeout'; do you mean timeout_s?",
        ),
        (lambda: ANY.Cluster.connect("a:1", unsafe=True), "there are insecure, peers"),
        (
            lambda: CLUSTER.quality("x", window=1),
            "no 'window'; do you mean windows?",
        ),
        (lambda: CLUSTER.load("x", contxt_tokens=1), "Cluster.load has no 'contxt_tokens'; do you"),
        (lambda: CLUSTER.quantize("x", "y", bit=1), "do you mean bits?"),
        (
            lambda: MODEL.embed("x", dimension=3),
            "Model.embed has no 'dimension'; do you mean dimensions?",
        ),
        (lambda: MODEL.score(promt="x"), "do you mean prompt?"),
        (lambda: MODEL.predict(prompt_token=1, output_tokens=2), "do you mean prompt_tokens?"),
        (
            lambda: MODEL.predict(new_tokens=1),
            "no 'new_tokens'; there are prompt_tokens, output_tokens, concurrency",
        ),
        (lambda: ANY.LoadOptions(context_length=1), "do you mean context_tokens?"),
        (lambda: asyncio.run(ANY.AsyncCluster.local(peer=2)), "AsyncCluster.local has no 'peer'"),
        (lambda: asyncio.run(ANY.AsyncCluster.discover(atleast=2)), "do you mean at_least?"),
        (lambda: asyncio.run(ASYNC_MODEL.score(promt="x")), "AsyncModel.score has no 'promt'"),
        (lambda: ANY.GenerationOptions(max_tokens=3), "do you mean max_new_tokens?"),
        (
            lambda: ANY.LoadOptions(context=3),
            "LoadOptions has no 'context'; do you mean context_tokens?",
        ),
    ],
)
def test_a_wrong_keyword_is_told_the_near_one(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(TypeError) as raised:
        call()
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda: MODEL.stream("x", {"max_new_tokens": 3}), "GenerationOptions"),
        (lambda: MODEL.stream_chat("x", {}), "GenerationOptions"),
        (lambda: asyncio.run(ASYNC_MODEL.generate("x", 3)), "GenerationOptions"),
        (lambda: ASYNC_MODEL.stream("x", edge.LoadOptions()), "GenerationOptions"),
        (lambda: asyncio.run(ASYNC_CLUSTER.load("x", {"dtype": "int4"})), "LoadOptions"),
    ],
)
def test_options_of_another_kind_are_told_which(call: Callable[[], Any], kind: str) -> None:
    said = f"options must be {kind} or None, not .*; write {kind}.*, or give its fields by name"
    with pytest.raises(TypeError, match=said):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ANY.LoadOptions(batch_invariant="no"), "batch_invariant must be True or False"),
        (lambda: ANY.LoadOptions(share_prefixes=0), "share_prefixes must be True or False, not 0"),
        (lambda: ANY.LoadOptions(observes=None), "observes must be True or False, not None"),
        (lambda: ANY.LoadOptions(workload=5), "workload must be an edge.Workload or None, not 5"),
        (lambda: ANY.LoadOptions(dtype=10**5000), "dtype an enormous number is not one of"),
        (lambda: ANY.LoadOptions(plan=[10**5000]), "or an edge.Plan, not [an enormous number]"),
        (lambda: ANY.LoadOptions(block_size=10**5000), "block size an enormous number is not"),
        (lambda: ANY.GenerationOptions(ignore_eos=1), "ignore_eos must be True or False, not 1"),
        (lambda: ANY.GenerationOptions(journal="no"), "journal must be True or False, not 'no'"),
        (lambda: ANY.GenerationOptions(thinking=1), "thinking must be True or False, or None"),
        (lambda: ANY.GenerationOptions(top_k=10**5000), "below 2147483648, not an enormous number"),
        (lambda: ANY.GenerationOptions(max_new_tokens=-(10**5000)), "not an enormous number"),
        (
            lambda: ANY.Cluster.connect(5),
            "5 is not a list of peers; give addresses, as texts host:port",
        ),
        (lambda: ANY.Cluster.connect([None]), "[None] is not a list of peers"),
        (lambda: ANY.Cluster.connect("a:1", insecure=1), "insecure must be True or False, not 1"),
        (lambda: ANY.Cluster.local(10**5000), "from 1 to 64, not an enormous number"),
        (lambda: ANY.Cluster.discover(timeout_s=float("nan")), "timeout_s must be 0 to 604800"),
        (lambda: ANY.Cluster.discover(interfaces="eth0"), "a list of texts or None, not 'eth0'"),
        (lambda: ANY.Cluster.discover(5), "cluster must be a text, not 5"),
        (lambda: CLUSTER.load("x", resumes=5), "resumes must be an edge.KeptReply or None, not 5"),
        (lambda: CLUSTER.load("x", progress=5), "True or False, a function, or None, not 5"),
        (lambda: CLUSTER.load(), "Cluster.load: missing a required argument: 'path'; it takes"),
        (lambda: CLUSTER.propose("x", changes="+1GiB on a"), "changes must be a list of texts"),
        (lambda: CLUSTER.set_memory(None, 5), "peer must be an edge.PeerInfo, not None"),
        (lambda: CLUSTER.remove_kept(None, []), "peer must be an edge.PeerInfo, not None"),
        (lambda: CLUSTER.forget_measured([5]), "devices must be a list of texts, not [5]"),
        (
            lambda: asyncio.run(ASYNC_CLUSTER.propose("x", measure="all")),
            "measure must be 'nothing', 'needed'",
        ),
        (lambda: asyncio.run(ASYNC_CLUSTER.kept("a")), "peer must be an edge.PeerInfo, not 'a'"),
        (lambda: asyncio.run(ASYNC_CLUSTER.quantize("x", "y", 5)), "options must be LoadOptions"),
        (lambda: MODEL.chat("x", tool_choice=None), "tool_choice must be a text, not None"),
        (lambda: MODEL.chat("x", variables=5), "variables must be a dictionary or None, not 5"),
        (lambda: MODEL.embed("x", normalize=1), "normalize must be True or False, not 1"),
        (lambda: MODEL.resume(5), "reply must be an edge.KeptReply or a text, not 5"),
        (lambda: MODEL.check([5]), "times must be a list of edge.PeerTimes objects or None"),
    ],
)
def test_a_value_of_another_kind_is_told_what_it_must_be(
    call: Callable[[], Any], message: str
) -> None:
    with pytest.raises(edge.RequestError) as raised:
        call()
    assert message in str(raised.value)


def test_checked_calls_look_as_they_were_written() -> None:
    assert "at_least" in inspect.signature(edge.Cluster.discover).parameters
    assert inspect.iscoroutinefunction(edge.AsyncModel.score)
    assert edge.Model.embed.__qualname__ == "Model.embed"
    assert not hasattr(GenerationOptions(seed=3), "__dict__")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_new_tokens": 0}, "must be 1 or more, not 0"),
        ({"max_new_tokens": "many"}, "must be 1 or more, not 'many'"),
        ({"temperature": -1}, "temperature must be a number of at least 0"),
        ({"stop": None}, "a text or a list of texts, not None"),
        ({"stop": ("",)}, "texts that are not empty"),
        ({"presence_penalty": 3}, "presence_penalty must be a number of at least -2 and at most 2"),
        ({"logit_bias": {1: float("nan")}}, "a logit_bias must be a number"),
        ({"logit_bias": {-1: 1}}, "a token id of logit_bias must be a whole number"),
        ({"logit_bias": [3]}, "logit_bias must be at most 1024 numbers by token id"),
        ({"logprobs": 21}, "logprobs must be 0 to 20, or None, not 21"),
        ({"logprobs": True}, "logprobs must be 0 to 20"),
        ({"seed": -1}, "seed must be 0 or more"),
    ],
    ids=str,
)
def test_an_answer_that_can_never_be(values: dict[str, Any], message: str) -> None:
    with pytest.raises(edge.RequestError) as raised:
        GenerationOptions(**values)
    assert message in str(raised.value)
    assert raised.value.remedy
    assert raised.value.remedy in str(raised.value)


USUAL = SamplingParameters(temperature=0.6, top_p=0.9, repetition_penalty=1.1)


def test_what_is_not_asked_for_is_as_the_model_has_it() -> None:
    options = GenerationOptions(top_p=0.5, min_p=0.0, seed=3)
    assert options.sampling(USUAL) == SamplingParameters(
        temperature=0.6, top_p=0.5, repetition_penalty=1.1, seed=3
    )
    assert GenerationOptions(temperature=0).sampling(USUAL).temperature == 0
    whole = GenerationOptions(max_new_tokens=None)
    terms = whole.terms([1], end_ids=frozenset(), room=500, usual=USUAL)
    assert terms.max_new_tokens == 500


def test_a_request_has_what_fits_and_a_seed_of_its_own() -> None:
    options = GenerationOptions(max_new_tokens=50, top_k=3, stop="END")
    one, other = (
        options.terms([1, 2], end_ids=frozenset({7}), room=20, usual=USUAL) for _ in range(2)
    )
    assert (one.prompt, one.max_new_tokens, one.stop) == ((1, 2), 20, ("END",))
    assert (one.sampling.top_k, one.end_ids) == (3, frozenset({7}))
    assert one.sampling.seed != other.sampling.seed
    on_and_on = GenerationOptions(ignore_eos=True, seed=5)
    terms = on_and_on.terms([1], end_ids=frozenset({7}), room=500, usual=USUAL)
    assert (terms.max_new_tokens, terms.end_ids, terms.sampling.seed) == (500, frozenset(), 5)
