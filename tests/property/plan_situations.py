"""Strategies: models whose sizes divide by nothing, on devices of any size and number."""

import dataclasses

from hypothesis import assume, settings
from hypothesis import strategies as st

from edge.partition import (
    CapacityError,
    ClusterSpec,
    DeviceSpec,
    ModelFacts,
    Parallel,
    Plan,
    PlanError,
    Workload,
    choose,
)
from tests.support.facts import plain_facts

Situation = tuple[ModelFacts, ClusterSpec, Workload]

PLANS = settings(max_examples=80)
"""Decorates every property of plans: always the same examples, however slow the machine."""


@st.composite
def models(draw: st.DrawFn, *, most_layers: int = 9) -> ModelFacts:
    num_kv_heads = draw(st.integers(1, 5))
    weights = st.one_of(st.just(0), st.integers(1, 50))
    return plain_facts(
        name=draw(st.text("mödel-/ 7", min_size=1, max_size=8)),
        num_layers=draw(st.integers(1, most_layers)),
        hidden_size=draw(st.integers(1, 99)),
        num_heads=num_kv_heads * draw(st.integers(1, 4)),
        num_kv_heads=num_kv_heads,
        ffn_columns=draw(st.integers(1, 100)),
        vocab_size=draw(st.integers(8, 200)),
        tied_embeddings=draw(st.booleans()),
        column_multiple=draw(st.sampled_from((1, 3, 16, 32))),
        query_head_bytes=draw(weights),
        kv_head_bytes=draw(weights),
        ffn_column_bytes=draw(weights),
        layer_bytes=draw(weights),
        embedding_row_bytes=draw(weights),
        head_row_bytes=draw(weights),
        kv_bytes_per_token=draw(st.integers(0, 5)),
    )


workloads = st.builds(
    Workload,
    prompt_tokens=st.integers(1, 40),
    output_tokens=st.integers(0, 9),
    concurrency=st.integers(1, 3),
)


def whole_bytes(model: ModelFacts, workload: Workload) -> int:
    """The model on one device, counted head by head and layer by layer."""
    tokens = (workload.prompt_tokens + workload.output_tokens) * workload.concurrency
    whole = model.vocab_size * (model.embedding_row_bytes + model.head_row_bytes)
    for layer in map(model.kinds.__getitem__, model.layers):
        whole += layer.layer_bytes + layer.ffn_columns * layer.ffn_column_bytes
        whole += sum(layer.query_head_bytes for _ in range(layer.num_heads))
        whole += sum(
            layer.kv_head_bytes + tokens * layer.kv_bytes_per_token
            for _ in range(layer.num_kv_heads)
        )
    return whole


@st.composite
def situations(draw: st.DrawFn, *, most_layers: int = 9, most_devices: int = 8) -> Situation:
    """Memory lies between far too little and plenty, and is often just about enough."""
    model = draw(models(most_layers=most_layers))
    workload = draw(workloads)
    whole = whole_bytes(model, workload)
    count = draw(st.integers(1, most_devices))
    hundredths = draw(
        st.one_of(
            st.lists(st.integers(0, 150), min_size=count, max_size=count),
            st.lists(st.integers(90 // count, 160 // count), min_size=count, max_size=count),
        )
    )
    ids = draw(st.permutations([f"d{number}" for number in range(count)]))
    devices = tuple(
        DeviceSpec(
            id=id,
            name=f"name of {id}",
            memory_bytes=whole * part // 100,
            threads=draw(st.integers(1, 16)),
        )
        for id, part in zip(ids, hundredths, strict=True)
    )
    return model, ClusterSpec(devices=devices), workload


parallels = st.sampled_from(("auto", "pipeline", "tensor"))


def solved(situation: Situation, parallel: Parallel) -> Plan:
    """A plan for the situation; where memory is short, with the memory that was asked for."""
    model, cluster, workload = situation
    try:
        return choose(model, cluster, workload, parallel=parallel).plan
    except CapacityError as error:
        return choose(model, with_more(cluster, error), workload, parallel=parallel).plan
    except PlanError:
        assume(False)
        raise


def with_more(cluster: ClusterSpec, error: CapacityError) -> ClusterSpec:
    missing = {shortage.device: shortage.missing_bytes for shortage in error.shortages}
    return ClusterSpec(
        devices=tuple(
            dataclasses.replace(
                device, memory_bytes=device.memory_bytes + missing.get(device.id, 0)
            )
            for device in cluster.devices
        )
    )
