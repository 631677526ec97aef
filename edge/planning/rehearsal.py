"""Peers of one host run a model with random weights together, in slices, to measure contention.

They share cores, memory and the scheduler. The cost of that cannot be computed from what each peer
measures alone: while one computes, others poll their links, are woken late, or have no core. So
real sessions answer a few tokens, with links, sums, sampling and the token's way back. The time
beyond the sum of the parts is a fact of N peers on this host.

In turn with that, the fastest of the peers runs the model alone. A machine can be a fifth faster in
one second than in the next, so this is a sample of its rates at that moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import statistics
import uuid
from collections.abc import Sequence
from typing import Self

from edge import partition
from edge.errors import CapacityError, EdgeError, PeerLostError, ProtocolError
from edge.kernels.sampling.parameters import SamplingParameters
from edge.memory.model_sizes import model_facts
from edge.models.spec import ModelSpec, by_kind
from edge.partition import (
    ClusterSpec,
    CrowdSpec,
    Estimate,
    ModelFacts,
    Plan,
    Workload,
    estimate,
)
from edge.planning.survey import Inquiry
from edge.planning.wire_format_choice import choose_wire_rules
from edge.protocol.assignment import COPIED_TOKENS, Assignment
from edge.protocol.client import PeerClient
from edge.protocol.error_codec import Failed
from edge.protocol.frame_codec import Event, Post
from edge.protocol.lease import Lease
from edge.protocol.peer_info import PeerInfo, gather_all, places
from edge.protocol.session_frames import MADE_UP_WEIGHTS, SECRET_BYTES, Close, Connect, Open
from edge.protocol.step import SamplingTerms, Step, StepEntry, StepLimits
from edge.protocol.step_frames import Finish, RunStep, Tokens
from edge.protocol.topology import Seat

REHEARSAL_LIMIT_S = 60.0

_WEIGHT_BYTES = 192 << 20
"""Weights of the shortened model, more than processor caches hold; at least one layer."""

_EMBEDDING_BYTES = 64 << 20

_PROMPT_TOKENS = 64
_NEW_TOKENS = 2 + COPIED_TOKENS["answers"]
"""The first token comes with the prompt, and the last is not computed with. So exactly one copy of
keys and values is sent."""

_ANSWERS = 7
"""Answers of each rehearsal; the first one warms up and does not count."""

_EVERY_COUNT_TO = 4
"""On a host with more peers than this, larger numbers are not measured, except for all peers."""


def counts(num_peers: int) -> list[int]:
    """The numbers of a host's peers that are measured together."""
    return sorted({*range(2, min(num_peers, _EVERY_COUNT_TO) + 1), num_peers} - {1})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Times of an answer, or the median of several."""

    first_token_s: float
    token_s: float
    """Seconds from one token to the next."""

    @classmethod
    def predicted(cls, estimate: Estimate) -> Times:
        return cls(first_token_s=estimate.first_token_s, token_s=estimate.token_s)

    @classmethod
    def median(cls, answers: Sequence[Times]) -> Times:
        return cls(
            first_token_s=statistics.median(each.first_token_s for each in answers),
            token_s=statistics.median(each.token_s for each in answers),
        )

    def over(self, other: Times) -> tuple[float, float]:
        """Ratios of these times to the other's: (a token, the first token)."""
        return self.token_s / other.token_s, self.first_token_s / other.first_token_s


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Times of some peers of a host for the shortened model: together in slices, and one peer
    alone."""

    model: ModelFacts
    workload: Workload
    plan: Plan
    together: Times
    alone: tuple[float, float] | None
    """Actual over predicted time of the peer alone: (a token, the first token). None: the model
    does not fit on one peer."""

    @property
    def rows(self) -> tuple[int, int]:
        """Rows of a decoding step, and of the prompt's step."""
        return 1, self.workload.prompt_tokens

    def crowd(
        self, cluster: ClusterSpec, pace: tuple[float, float], link: tuple[float, float]
    ) -> CrowdSpec:
        """The time that the rates of these devices, at the trial's pace, do not explain.

        cluster: with rates at the trial's pace. pace: the pace at which plans are predicted; the
        result is scaled to it. link: the link assumed between all devices of the host.
        """
        rows = self.rows
        nothing = CrowdSpec(
            host=cluster.device(self.plan.devices[0]).host,
            count=len(self.plan.devices),
            rows=rows,
            sum_s=(0.0,) * len(rows),
            slower=(1.0,) * len(rows),
            pace=pace,
            link=link,
        )
        found = estimate(
            self.plan,
            self.model,
            dataclasses.replace(cluster, crowds=(nothing,)),
            self.workload,
            chunk_tokens=self.workload.prompt_tokens,
        )
        predicted = Times.predicted(found)
        sums = 2 * self.model.num_layers + 1
        token, first = (now / then for now, then in zip(pace, self.alone or pace, strict=True))
        return dataclasses.replace(
            nothing,
            sum_s=(
                token * (self.together.token_s - predicted.token_s) / sums,
                first * (self.together.first_token_s - predicted.first_token_s) / sums,
            ),
            slower=self.together.over(predicted),
        )


async def rehearse(
    inquiry: Inquiry, peers: Sequence[PeerInfo], cluster: ClusterSpec
) -> Trial | None:
    """Have these peers of one host answer as one stage. The cluster has their rates.

    None, with a note, where they cannot. Raises PeerLostError.
    """
    spec = _shortened(inquiry)
    workload = _workload(spec)
    facts = model_facts(spec, inquiry.weight_format, name="rehearsal", embedding_itemsize=4)

    def planned(group: Sequence[PeerInfo]) -> tuple[Plan, _Rehearsal, Times]:
        others = {each.id for each in cluster.devices} - {each.id for each in group}
        choice = partition.choose(
            facts,
            dataclasses.replace(cluster.without(*others), crowds=()),
            workload,
            parallel="tensor",
            chunk_tokens=workload.prompt_tokens,
        )
        assert choice.predicted is not None
        rehearsal = _Rehearsal(inquiry, spec, choice.plan, group, workload)
        return choice.plan, rehearsal, Times.predicted(choice.predicted)

    try:
        plan, together, _ = planned(peers)
        async with asyncio.timeout(REHEARSAL_LIMIT_S), together:
            try:
                _, alone, predicted = planned(peers[:1])
                async with alone:
                    times, own = await _in_turn(together, alone)
                pace = own.over(predicted)
            except (CapacityError, partition.CapacityError):  # the model does not fit on one peer
                (times,), pace = await _in_turn(together), None
    except (PeerLostError, ProtocolError):
        raise
    except (EdgeError, partition.PartitionError, TimeoutError) as error:
        names = ", ".join(peer.name for peer in peers)
        reason = str(error) or f"it took more than {REHEARSAL_LIMIT_S:.0f} s"
        inquiry.on_note(f"{names} were not measured together, only one by one: {reason}")
        return None
    return Trial(model=facts, workload=workload, plan=plan, together=times, alone=pace)


async def _in_turn(*rehearsals: _Rehearsal) -> list[Times]:
    found = [[await each.answer(number) for each in rehearsals] for number in range(_ANSWERS)]
    return [Times.median(answers) for answers in zip(*found[1:], strict=True)]


def _shortened(inquiry: Inquiry) -> ModelSpec:
    """The model with only enough layers to exceed caches, and with a small vocabulary that is
    quickly made."""
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
    """Sessions with random weights on these peers; they are closed on exit."""

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
        """Times at which tokens came, or the error that ended them."""

    async def __aenter__(self) -> Self:
        try:
            for seat, peer in self._peers.items():
                client = await peer.connect(on_event=self._hear)
                self._stack.push_async_callback(client.aclose)
                self._clients[seat] = client
                client.watch(self._told.put_nowait)
            lease = Lease()
            await gather_all(
                client.call(
                    Open(
                        assignment=self._assignment(seat),
                        lease=lease,
                        prefix_secret=bytes(SECRET_BYTES),
                    )
                )
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
            if of_error == (None, None, None):  # otherwise closing the connections ends the
                # sessions
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
            # The default of one machine; with other settings, the prediction is a little low.
            copies_kv="none" if self._spec.has_states else "answers",
            wire_rules=choose_wire_rules(
                "float32", self._plan, links=(), weight_format=self._inquiry.weight_format
            ),
        )

    async def answer(self, number: int) -> Times:
        request = str(number)
        terms = SamplingTerms(
            sampling=SamplingParameters(),
            end_ids=frozenset(),
            max_new_tokens=self._new_tokens,
            prompt_tokens=self._prompt_tokens,
        )
        entry = StepEntry(
            request=request, position=0, tokens=(0,) * self._prompt_tokens, logit_rows=1
        )
        step = Step(entries=(entry,), run=self._new_tokens)
        begin_s = asyncio.get_running_loop().time()
        await self._post(RunStep(session=self._session, step=step, terms={request: terms}))
        moments = [await self._token() for _ in range(self._new_tokens)]
        await self._post(Finish(session=self._session, request=request))
        return Times(
            first_token_s=moments[0] - begin_s,
            token_s=(moments[-1] - moments[0]) / (len(moments) - 1),
        )

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
