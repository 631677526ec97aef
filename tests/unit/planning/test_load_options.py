"""How loading options become limits of steps and a workload to plan for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_type_hints

import pytest

import edge
from edge.errors import RequestError
from edge.models.spec import ModelSpec
from edge.partition import Workload
from edge.planning.load_options import (
    DEFAULT_CONTEXT_TOKENS,
    MAX_REQUESTS_AT_ONCE,
    LoadOptions,
    parse_devices,
)
from edge.planning.load_sizes import LoadSizes
from edge.weights.formats import AUTO, DTYPES, ENCODINGS, Dtype
from tests.support.specs import plain_spec


def spec(context_tokens: int) -> ModelSpec:
    return plain_spec(
        num_layers=2,
        hidden_size=8,
        num_heads=4,
        num_kv_heads=2,
        head_size=2,
        ffn_columns=12,
        vocab_size=16,
        context_tokens=context_tokens,
    )


def test_the_context_is_what_the_model_has_up_to_a_default() -> None:
    assert LoadOptions().limits(spec(100)).context_tokens == 100
    assert LoadOptions().limits(spec(100_000)).context_tokens == DEFAULT_CONTEXT_TOKENS
    assert LoadOptions(context_tokens=64).limits(spec(100)).context_tokens == 64


def test_a_longer_workload_makes_the_default_context_longer() -> None:
    options = LoadOptions(workload=Workload(prompt_tokens=8000, output_tokens=1000))
    assert options.limits(spec(100_000)).context_tokens == 9000
    assert LoadSizes.of(options, spec(100_000)).workload.reserved_tokens == 9000


def test_memory_is_kept_for_the_context_whatever_the_workload() -> None:
    wished = Workload(prompt_tokens=20, output_tokens=10, concurrency=3)
    options = LoadOptions(context_tokens=64, concurrency=2, workload=wished)
    planned = LoadSizes.of(options, spec(100)).workload
    assert planned == replace(wished, reserved_tokens=128, states=MAX_REQUESTS_AT_ONCE + 2)
    assert planned.cached_tokens == 128


@pytest.mark.parametrize("context_tokens", [1, 2, 100, 639, 640, 5000])
def test_the_usual_workload_fits_every_context(context_tokens: int) -> None:
    planned = LoadSizes.of(LoadOptions(concurrency=4), spec(context_tokens)).workload
    assert planned.context_tokens <= context_tokens
    assert planned.concurrency == 4
    if context_tokens >= 640:
        assert (planned.prompt_tokens, planned.output_tokens) == (512, 128)


def test_a_workload_that_does_not_fit_the_context() -> None:
    options = LoadOptions(context_tokens=64, workload=Workload(prompt_tokens=60, output_tokens=5))
    with pytest.raises(RequestError, match=r"60 \+ 5 tokens does not fit the context of 64"):
        LoadSizes.of(options, spec(100))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"plan": "ring"}, "plan must be"),
        ({"concurrency": 0}, "concurrency must be 1 to"),
        ({"concurrency": True}, "concurrency must be 1 to"),
        ({"dtype": "fp4"}, "dtype 'fp4'"),
        ({"prefixes_of": "0123456789abcdef"}, "prefixes_of must be ids of devices"),
        ({"prefixes_of": (5,)}, "prefixes_of must be ids of devices"),
        ({"prefixes_of": ("0123456789abcde",)}, "names no devices; write ID"),
        ({"prefixes_of": ("0123456789abcdef",) * 17}, "17 devices; name at most 16"),
        ({"stream": True}, "stream must be 'auto', 'on' or 'off', not True"),
        ({"workload": 512}, r"workload must be an edge.Workload or None, not 512"),
    ],
    ids=str,
)
def test_options_that_can_never_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as raised:
        LoadOptions(**options)
    assert raised.value.remedy
    assert raised.value.remedy in str(raised.value)


def test_the_names_of_formats_are_those_of_the_table() -> None:
    """For who checks types, and for who adds one."""
    assert (AUTO, *ENCODINGS) == DTYPES
    assert get_type_hints(LoadOptions)["dtype"] == Dtype == edge.Dtype


def test_devices_are_named_as_they_are_shown() -> None:
    assert parse_devices("0123 4567 89AB cdef,ffffffffffffffff0") == (
        "0123456789abcdef",
        "ffffffffffffffff0",
    )
    named = LoadOptions(prefixes_of=("0123 4567 89AB cdef",))
    assert named.trusted == ("0123456789abcdef",)
