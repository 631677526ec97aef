"""How long a context becomes where nobody says one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from edge.memory.model_sizes import model_facts
from edge.memory.shard_memory import most_overhead
from edge.models.rotary import Rotary
from edge.models.spec import WINDOWED_KV, ModelSpec
from edge.partition import ClusterSpec, choose, memory_use
from edge.planning.load_options import DEFAULT_CONTEXT_TOKENS, LoadOptions
from edge.planning.load_sizes import LoadSizes
from edge.planning.longest_context import longer_contexts, with_longest_context
from edge.planning.overhead import Overhead
from edge.planning.proposal import Proposal
from edge.protocol.peer_info import PeerInfo
from edge.protocol.wire_rules import WireRules
from edge.transport import WireRule
from tests.support.formats import uniform_format
from tests.support.peer_infos import peer_info
from tests.support.plans import make_plan
from tests.support.specs import changed, plain_spec

SPEC = plain_spec(context_tokens=100_000, ffn_columns=20_000, num_layers=16)
"""Its weights take more than a context of some thousand tokens."""
FACTS = model_facts(SPEC, uniform_format("float32", 32, "fast"), name="m", embedding_itemsize=4)
TOKEN_BYTES = sum(FACTS.kinds[kind].token_bytes for kind in FACTS.layers)


def steps(context_tokens: int, *, peers: int = 1) -> int:
    """Bytes that the largest step takes."""
    limits = LoadOptions(context_tokens=context_tokens).limits(SPEC)
    return most_overhead(
        SPEC, limits, may_split=peers > 1, stream=False, kv_dtype="float32", has_tiles=True
    )


def proposal(
    options: LoadOptions,
    peers: list[PeerInfo],
    spec: ModelSpec = SPEC,
    *,
    kv_tokens: int | None = None,
) -> Proposal:
    taken = steps(DEFAULT_CONTEXT_TOKENS, peers=len(peers))
    cluster = ClusterSpec(devices=tuple(each.device(buffer_bytes=taken) for each in peers))
    sizes = LoadSizes.of(options, spec)
    workload = replace(sizes, kv_tokens=kv_tokens or sizes.kv_tokens).workload
    parallel = options.plan
    assert isinstance(parallel, str)
    choice = choose(FACTS, cluster, workload, parallel=parallel)
    stages = len(choice.plan.stages)
    return Proposal(
        choice=choice,
        model=FACTS,
        cluster=cluster,
        workload=workload,
        limits=sizes.limits,
        wire_rules=WireRules(sums=(WireRule(),) * stages, hops=(WireRule(),) * (stages - 1)),
        dtype="float32",
        weights="float32",
        overhead={
            each.id: Overhead(promised_bytes=1 << 40, floor_bytes=0, buffer_bytes=taken)
            for each in peers
        },
    )


def peer(name: str, free: int, **said: Any) -> PeerInfo:
    return peer_info(name, free_bytes=free, model_free_bytes=free, **{"host": name, **said})


def longest(
    options: LoadOptions, peers: list[PeerInfo], spec: ModelSpec = SPEC
) -> tuple[Proposal, Proposal]:
    """A proposal as it is made at first, and with the longest context."""
    before = proposal(options, peers, spec)
    return before, with_longest_context(before, spec, options, peers)


def needed(context_tokens: int, *, concurrency: int = 1) -> int:
    """Bytes with which one peer has just room for that context in half of what is left."""
    plan = choose(
        FACTS,
        ClusterSpec(devices=(peer("a", 1 << 40).device(buffer_bytes=0),)),
        LoadSizes.of(LoadOptions(), SPEC).workload,
    ).plan
    usual = LoadSizes.of(LoadOptions(concurrency=concurrency), SPEC).workload
    taken = memory_use(plan, FACTS, usual)["a"].total + steps(DEFAULT_CONTEXT_TOKENS)
    more = (context_tokens - DEFAULT_CONTEXT_TOKENS) * concurrency * TOKEN_BYTES
    return taken + 2 * (more + steps(context_tokens) - steps(DEFAULT_CONTEXT_TOKENS))


@pytest.mark.parametrize("concurrency", [1, 3])
@pytest.mark.parametrize("context", [8192, 65_536, 100_000])
def test_half_of_what_is_left_is_for_a_longer_context(context: int, concurrency: int) -> None:
    options = LoadOptions(concurrency=concurrency)
    enough = needed(context, concurrency=concurrency)
    before, after = longest(options, [peer("a", enough)])
    assert after.context_tokens == context
    assert after.choice == before.choice
    assert after.workload.cached_tokens == context * concurrency
    assert after.overhead["a"].buffer_bytes == steps(context)
    assert 0 <= after.rows[0].left_bytes <= before.rows[0].left_bytes // 2 + 1
    _before, less = longest(options, [peer("a", enough - 2)])
    assert less.context_tokens < context


def test_without_room_it_stays() -> None:
    before, after = longest(LoadOptions(), [peer("a", needed(DEFAULT_CONTEXT_TOKENS))])
    assert before is after
    assert after.context_tokens == DEFAULT_CONTEXT_TOKENS


def test_daemons_of_one_machine_share_what_is_left() -> None:
    options = LoadOptions(plan="tensor")
    free = needed(65_536)
    apart = [peer("a", free), peer("b", free)]
    together = [peer("a", free, host="h"), peer("b", free, host="h")]
    contexts = [longest(options, peers)[1].context_tokens for peers in (apart, together)]
    assert contexts[0] > contexts[1] > DEFAULT_CONTEXT_TOKENS


@pytest.mark.parametrize(("part", "grows"), [(1.02, False), (0.98, True)])
def test_no_device_becomes_one_that_cannot_be_lost(part: float, grows: bool) -> None:
    """Where each has just room for the whole model beside a usual context; or never had it."""
    options = LoadOptions(plan="tensor")
    one = proposal(LoadOptions(), [peer("a", 1 << 40)])
    alone = one.rows[0].memory.total + steps(DEFAULT_CONTEXT_TOKENS, peers=2)
    before, after = longest(options, [peer(name, int(part * alone)) for name in "ab"])
    assert len(before.plan.devices) == 2
    assert (after.context_tokens > DEFAULT_CONTEXT_TOKENS) == grows


def test_what_is_said_is_taken() -> None:
    plenty = [peer("a", 1 << 40)]
    assert longest(LoadOptions(context_tokens=5000), plenty)[1].context_tokens == 5000
    assert longest(LoadOptions(), plenty)[1].context_tokens == 100_000


def test_tokens_do_not_depend_on_how_much_memory_there_is() -> None:
    """Scales of rounded keys and values depend on the context, and so do long rotary positions."""
    spec = plain_spec(context_tokens=100_000)
    assert list(longer_contexts(LoadOptions(kv_dtype="int8"), spec)) == []
    frequencies = spec.attention.rotary.inverse_frequencies

    def turned(trained_tokens: int) -> ModelSpec:
        rotary = Rotary(
            inverse_frequencies=frequencies,
            long_inverse_frequencies=frequencies,
            trained_tokens=trained_tokens,
        )
        return changed(spec, rotary=rotary)

    assert list(longer_contexts(LoadOptions(), turned(4096))) == []
    assert list(longer_contexts(LoadOptions(), turned(10_000))) == [10_000, 8192]
    assert next(longer_contexts(LoadOptions(), turned(64))) == 100_000


def test_a_limit_of_keys_and_values_holds() -> None:
    limited = [peer("a", 1 << 40, kv_memory_bytes=20_000 * TOKEN_BYTES)]
    before = proposal(LoadOptions(), limited)
    after = with_longest_context(before, SPEC, LoadOptions(), limited)
    assert after.context_tokens == 16_384
    # As much on disk as may be: what has no room in memory stays as it is.
    small = [peer("a", 1 << 40, kv_memory_bytes=1000 * TOKEN_BYTES, kv_disk_bytes=1 << 40)]
    before = proposal(LoadOptions(), small, kv_tokens=1000)
    assert with_longest_context(before, SPEC, LoadOptions(), small) is before


def test_windows_that_pay_behind_a_longer_context_are_kept_there() -> None:
    """As of OLMo 3: 4,096 tokens, in three of four layers. Not if a peer keeps all tokens."""
    windows = (4096, 4096, 4096, None)
    spec = plain_spec(
        context_tokens=100_000, ffn_columns=20_000, num_layers=16, windows=windows * 4
    )
    facts = model_facts(spec, uniform_format("float32", 32, "fast"), name="m", embedding_itemsize=4)
    enough = needed(40_000)
    for lacks, kept in (((), True), ((WINDOWED_KV,), False)):
        peers = [peer("a", enough, lacks=lacks)]
        plan = proposal(LoadOptions(), peers)
        before = replace(
            plan,
            model=facts,
            choice=replace(plan.choice, plan=make_plan(spec, "solo", model="m", devices=["a"])),
        )
        assert before.limits.windows == 0
        after = with_longest_context(before, spec, LoadOptions(), peers)
        assert after.limits.windows == int(kept)
        assert [kind.window_tokens is not None for kind in after.model.kinds] == [kept, False]
        assert after.context_tokens == (100_000 if kept else 32_768)
