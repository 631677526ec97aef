"""Facts refuse what cannot be, at construction and in a sentence."""

import dataclasses
import math
from typing import Any

import pytest

from edge.partition import ClusterSpec, DeviceSpec, LinkSpec, Workload
from tests.support.facts import changed_facts, plain_facts

MODEL = plain_facts(
    name="tiny",
    num_layers=4,
    hidden_size=64,
    num_heads=8,
    num_kv_heads=2,
    ffn_columns=96,
    vocab_size=100,
    tied_embeddings=False,
    column_multiple=32,
    query_head_bytes=10,
    kv_head_bytes=10,
    ffn_column_bytes=3,
    layer_bytes=5,
    embedding_row_bytes=4,
    head_row_bytes=2,
    kv_bytes_per_token=1,
)


def device(id: str, *, memory_bytes: int = 1000, threads: int = 1) -> DeviceSpec:
    return DeviceSpec(id=id, name=id.upper(), memory_bytes=memory_bytes, threads=threads)


def link(source: str, target: str) -> LinkSpec:
    return LinkSpec(source=source, target=target, latency_s=0.001, bytes_per_s=1e8)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"id": ""}, "device's id must be 1 to 1024 characters"),
        ({"id": "a\nb"}, "without line breaks"),
        ({"name": "x" * 1025}, "name of device 'a' must be"),
        ({"name": "\x1b[2J"}, "control"),
        ({"name": "\ud800"}, "must be 1 to"),
        ({"memory_bytes": -1}, "memory_bytes of device 'a' must be 0 or more, not -1"),
        ({"threads": 0}, "threads of device 'a' must be 1 or more, not 0"),
    ],
)
def test_device_refuses(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        dataclasses.replace(device("a"), **changes)


def test_a_device_may_have_any_friendly_name() -> None:
    assert dataclasses.replace(device("a"), name="Zoë’s 👩‍💻 laptop").name.startswith("Zoë")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"target": "a"}, "two different devices"),
        ({"latency_s": -0.1}, "latency_s"),
        ({"latency_s": math.nan}, "latency_s"),
        ({"bytes_per_s": 0.0}, "bytes_per_s"),
        ({"bytes_per_s": math.nan}, "bytes_per_s"),
    ],
)
def test_link_refuses(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        dataclasses.replace(link("a", "b"), **changes)


def test_cluster_refuses_the_same_id_twice() -> None:
    with pytest.raises(ValueError, match="'a' is in the cluster twice"):
        ClusterSpec(devices=(device("a"), device("b"), device("a")))


def test_cluster_refuses_a_link_to_nowhere() -> None:
    with pytest.raises(ValueError, match="names 'b', which is not a device"):
        ClusterSpec(devices=(device("a"),), links=(link("a", "b"),))


def test_cluster_finds_a_device_by_id() -> None:
    cluster = ClusterSpec(devices=(device("a"), device("b", threads=3)))
    assert cluster.device("b").threads == 3
    with pytest.raises(ValueError, match="no device 'c'"):
        cluster.device("c")


def test_cluster_without_a_device_loses_its_links_and_keeps_the_rest() -> None:
    a, b, c = device("a"), device("b"), device("c")
    cluster = ClusterSpec(devices=(a, b, c), links=(link("a", "b"), link("c", "a"), link("b", "c")))
    assert cluster.without("b") == ClusterSpec(devices=(a, c), links=(link("c", "a"),))
    assert cluster.without("b", "b", "gone") == cluster.without("b")
    assert cluster.without("a", "b", "c") == ClusterSpec(devices=())


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"name": ""}, "model's name"),
        ({"num_layers": 0}, "num_layers of model 'tiny' must be 1 or more"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"column_multiple": 0}, "column_multiple"),
        ({"kv_bytes_per_token": -1}, "kv_bytes_per_token of a layer must be 0 or more"),
        ({"num_kv_heads": 3}, "8 query heads, which 3 KV heads cannot share evenly"),
    ],
)
def test_model_refuses(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        changed_facts(MODEL, **changes)


def test_workload_counts_tokens() -> None:
    workload = Workload(prompt_tokens=30, output_tokens=12, concurrency=5)
    assert workload.context_tokens == 42
    assert workload.cached_tokens == 210
    assert Workload().context_tokens == 640


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("prompt_tokens", 0, "prompt_tokens must be a whole number from 1 to 1000000000, not 0"),
        ("output_tokens", -1, "output_tokens must be a whole number from 0 to 1000000000, not -1"),
        ("concurrency", 0, "concurrency must be .*, not 0"),
        ("concurrency", True, "concurrency must be .*, not True"),
        ("prompt_tokens", "5", "prompt_tokens must be .*, not '5'"),
        ("prompt_tokens", 2.5, "not 2.5"),
        ("prompt_tokens", None, "not None"),
        ("output_tokens", float("nan"), "not nan"),
        ("output_tokens", 10**400, "not an enormous number"),
        ("output_tokens", 10**5000, "not an enormous number"),
        ("states", [10**5000], "not one of the type list"),
        ("reserved_tokens", 10**400, "reserved_tokens must be .*, not an enormous number"),
        ("expert_hits", "5", "expert_hits are '5', not 0 to 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "value",
)
def test_workload_refuses(name: str, value: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Workload(**{name: value})


def test_facts_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        MODEL.vocab_size = 5  # type: ignore[misc]
