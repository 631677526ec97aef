"""Peers of one host run a made-up model together, in slices, as they would run the real one.

They share its cores, its memory and its scheduler, and what that costs cannot be put together from
what each measures alone: while one computes, others poll their links, are woken late, or have no
core at all. So real sessions answer a few tokens, over their links, with sums, samples and tokens
that are told; what this takes longer than its parts say is a fact of N peers of this host.

The fastest of them runs the model alone in turn with that. A machine is a fifth faster in one
second than in another; what one answer takes of the other, it takes in any.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import statistics
import uuid
from collections.abc import Sequence
from typing import NamedTuple, Self

import partition
from edge.errors import CapacityError, EdgeError, PeerLostError, ProtocolError
from edge.memory.model_sizes import model_facts
from edge.models.spec import ModelSpec, by_kind
from edge.planning.survey import Inquiry
from edge.planning.wire_format_choice import choose_wire_rules
from edge.protocol.assignment import Assignment
from edge.protocol.client import PeerClient
from edge.protocol.error_codec import Failed
from edge.protocol.frame_codec import Event, Post
from edge.protocol.messages import MADE_UP_WEIGHTS, Close, Connect, Finish, Open, RunStep, Tokens
from edge.protocol.peer_info import PeerInfo, gather_all, places
from edge.protocol.step import SamplingTerms, Step, StepEntry, StepLimits
from edge.protocol.topology import Seat
from kernels.sampling.parameters import SamplingParameters
from partition import ClusterSpec, CrowdSpec, Plan, Workload

REHEARSAL_LIMIT_S = 60.0

_WEIGHT_BYTES = 192 << 20
"""More than caches hold, of all peers together; at least one layer."""

_EMBEDDING_BYTES = 64 << 20

_PROMPT_TOKENS = 32
_NEW_TOKENS = 48
_ANSWERS = 7
"""The first warms up."""

_EVERY_COUNT_TO = 4
"""With more peers than these on a host, only all of them are tried as well."""


def counts(num_peers: int) -> list[int]:
    """How many of a host's peers are measured together."""
    return sorted({*range(2, min(num_peers, _EVERY_COUNT_TO) + 1), num_peers} - {1})


async def rehearse(
    inquiry: Inquiry, peers: Sequence[PeerInfo], cluster: ClusterSpec
) -> CrowdSpec | None:
    """What these peers of one host, whose rates the cluster has, cost each other in one stage.

    None, and a note, where they cannot be tried. Raises PeerLostError.
    """
    spec = _shortened(inquiry)
    workload = _workload(spec)
    facts = model_facts(spec, inquiry.weight_format, name="rehearsal", embedding_itemsize=4)

    def planned(group: Sequence[PeerInfo]) -> tuple[_Rehearsal, _Times]:
        others = {each.id for each in cluster.devices} - {each.id for each in group}
        among = dataclasses.replace(cluster.without(*others), crowds=())
        choice = partition.choose(
            facts, among, workload, parallel="tensor", chunk_tokens=workload.prompt_tokens
        )
        assert choice.predicted is not None
        predicted = _Times(choice.predicted.first_token_s, choice.predicted.token_s)
        return _Rehearsal(inquiry, spec, choice.plan, group, workload), predicted

    try:
        together, predicted = planned(peers)
        async with asyncio.timeout(REHEARSAL_LIMIT_S), together:
            try:
                alone, usual = planned(peers[:1])
                async with alone:
                    times = await _in_turn(together, alone, usual)
            except (CapacityError, partition.CapacityError):  # not the whole model on one of them
                times = await _in_turn(together)
    except (PeerLostError, ProtocolError):
        raise
    except (EdgeError, partition.PartitionError, TimeoutError) as error:
        names = ", ".join(peer.name for peer in peers)
        reason = str(error) or f"it took more than {REHEARSAL_LIMIT_S:.0f} s"
        inquiry.on_note(f"{names} were not measured together, only one by one: {reason}")
        return None
    sums = 2 * spec.num_layers + 1
    return CrowdSpec(
        host=peers[0].host,
        count=len(peers),
        rows=(1, workload.prompt_tokens),
        sum_s=(
            (times.token_s - predicted.token_s) / sums,
            (times.first_token_s - predicted.first_token_s) / sums,
        ),
        slower=(
            times.token_s / predicted.token_s,
            times.first_token_s / predicted.first_token_s,
        ),
    )


class _Times(NamedTuple):
    first_token_s: float
    token_s: float
    """From one token to the next."""


async def _in_turn(
    together: _Rehearsal, alone: _Rehearsal | None = None, usual: _Times | None = None
) -> _Times:
    """What answers of all take while one alone takes its usual time; the median."""
    found: list[_Times] = []
    for number in range(_ANSWERS):
        times = await together.answer(number)
        if alone is not None and usual is not None:
            now = await alone.answer(number)
            times = _Times(
                times.first_token_s / now.first_token_s * usual.first_token_s,
                times.token_s / now.token_s * usual.token_s,
            )
        found.append(times)
    return _Times(*map(statistics.median, zip(*found[1:], strict=True)))


def _shortened(inquiry: Inquiry) -> ModelSpec:
    """The model with as many layers as caches do not hold, and a vocabulary that is soon made."""
    spec = inquiry.spec
    facts = model_facts(spec, inquiry.weight_format, name="rehearsal", embedding_itemsize=4)
    layers, total_bytes = [], 0
    for kind in spec.layers:
        if total_bytes >= _WEIGHT_BYTES:
            break
        layers.append(spec.kinds[kind])
        total_bytes += facts.kinds[kind].weight_bytes
    return dataclasses.replace(
        spec,
        **by_kind(layers),
        vocab_size=min(spec.vocab_size, max(256, _EMBEDDING_BYTES // (4 * spec.hidden_size))),
    )


def _workload(spec: ModelSpec) -> Workload:
    prompt_tokens = min(_PROMPT_TOKENS, spec.context_tokens // 2)
    new_tokens = min(_NEW_TOKENS, spec.context_tokens - prompt_tokens)
    return Workload(prompt_tokens=prompt_tokens, output_tokens=new_tokens)


class _Rehearsal:
    """Sessions of made-up weights on these peers, which end with it."""

    def __init__(
        self,
        inquiry: Inquiry,
        spec: ModelSpec,
        plan: Plan,
        peers: Sequence[PeerInfo],
        workload: Workload,
    ) -> None:
        self._prompt_tokens = workload.prompt_tokens
        self._new_tokens = workload.output_tokens
        self._inquiry = inquiry
        self._spec = spec
        self._plan = plan
        by_id = {peer.id: peer for peer in peers}
        self._peers: dict[Seat, PeerInfo] = {
            (number, rank): by_id[shard.device]
            for number, stage in enumerate(plan.stages)
            for rank, shard in enumerate(stage.shards)
        }
        self._session = uuid.uuid4().hex
        self._clients: dict[Seat, PeerClient] = {}
        self._stack = contextlib.AsyncExitStack()
        self._told: asyncio.Queue[float | EdgeError] = asyncio.Queue()
        """When tokens came, or why none will."""

    async def __aenter__(self) -> Self:
        try:
            for seat, peer in self._peers.items():
                client = await PeerClient.connect(peer.address, on_event=self._hear)
                self._stack.push_async_callback(client.aclose)
                self._clients[seat] = client
                client.watch(self._told.put_nowait)
            await gather_all(
                client.call(Open(assignment=self._assignment(seat)))
                for seat, client in self._clients.items()
            )
            connect = Connect(session=self._session, places=places(self._peers))
            await gather_all(client.call(connect) for client in self._clients.values())
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *of_error: object) -> None:
        async with self._stack:
            if of_error == (None, None, None):  # else connections close, and sessions with them
                close = Close(session=self._session)
                await gather_all(client.call(close) for client in self._clients.values())

    def _assignment(self, seat: Seat) -> Assignment:
        context_tokens = self._prompt_tokens + self._new_tokens
        return Assignment(
            session=self._session,
            model=self._spec,
            plan=self._plan,
            stage=seat[0],
            rank=seat[1],
            weight_format=self._inquiry.weight_format,
            manifest_digest=MADE_UP_WEIGHTS,
            weights_digest=MADE_UP_WEIGHTS,
            limits=StepLimits(
                context_tokens=context_tokens,
                chunk_tokens=self._prompt_tokens,
                requests=1,
                cached_tokens=context_tokens,
            ),
            kv_dtype="float32",
            wire_rules=choose_wire_rules(
                "float32", self._plan, links=(), weight_format=self._inquiry.weight_format
            ),
        )

    async def answer(self, number: int) -> _Times:
        request = str(number)
        terms = SamplingTerms(
            sampling=SamplingParameters(), end_ids=frozenset(), max_new_tokens=self._new_tokens
        )
        entry = StepEntry(
            request=request, position=0, tokens=(0,) * self._prompt_tokens, logit_rows=1
        )
        step = Step(entries=(entry,), run=self._new_tokens)
        begin_s = asyncio.get_running_loop().time()
        await self._post(RunStep(session=self._session, step=step, terms={request: terms}))
        moments = [await self._token() for _ in range(self._new_tokens)]
        await self._post(Finish(session=self._session, request=request))
        return _Times(moments[0] - begin_s, (moments[-1] - moments[0]) / (len(moments) - 1))

    async def _post(self, post: Post) -> None:
        await gather_all(client.post(post) for client in self._clients.values())

    async def _token(self) -> float:
        told = await self._told.get()
        if isinstance(told, EdgeError):
            raise told
        return told

    def _hear(self, client: PeerClient, event: Event) -> None:
        if isinstance(event, Failed):
            self._told.put_nowait(event.as_error(client.name))
        elif isinstance(event, Tokens):
            self._told.put_nowait(asyncio.get_running_loop().time())
