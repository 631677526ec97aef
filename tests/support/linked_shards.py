"""The shards of a plan in one process, linked in memory.

Their model is made up: logits follow from the tokens of a request alone, and nothing is computed.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.backends.interface import HostLogits, ShardWeights, StepLogits
from edge.backends.null import made_up
from edge.backends.null.backend import NullBackend
from edge.backends.null.program import NullProgram
from edge.engine.drafter import Drafter
from edge.engine.prefix_cache import PrefixStorage
from edge.engine.shard_engine import NO_MASKS, ShardEngine
from edge.kernels.sampling.logprobs import Logprobs
from edge.kernels.sampling.parameters import SamplingParameters
from edge.kernels.sampling.shortlist import SHORTLIST_TOKENS
from edge.models.spec import ModelSpec
from edge.offload import KVTier, Manifest
from edge.partition import Plan, Shard, Stage
from edge.protocol.assignment import Assignment
from edge.protocol.frame_codec import Event
from edge.protocol.step import SamplingTerms, Step, StepEntry, StepLimits
from edge.protocol.step_frames import Tokens
from edge.protocol.token_masks import PackedMask
from edge.protocol.topology import Seat
from edge.protocol.wire_rules import WireRules
from edge.transport import Collective, Link, LinkState, WireRule
from edge.weights.formats import KvDtype, WeightFormat
from edge.weights.layout import ShardLayout
from tests.support.formats import uniform_format
from tests.support.specs import plain_spec
from tests.support.transport_pairs import link_ends
from tests.support.triton_face import only_interpreted

VOCAB = 3000
SPEC = plain_spec(
    num_layers=2,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=4,
    head_size=8,
    ffn_columns=4,
    vocab_size=VOCAB,
    context_tokens=64,
)


@functools.cache
def logits_after(*tokens: int) -> NDArray[np.float32]:
    """As peaked as a model's; (VOCAB,)."""
    return made_up.logits_after(SPEC, tokens)


class MadeUpProgram(NullProgram):
    """A shard whose logits may be broken, or lie where a GPU's do."""

    broken_id: int | None = None
    ranks = False

    def forward(
        self, step: Step, hidden: NDArray[np.float32] | None, collective: Collective
    ) -> NDArray[np.float32]:
        found = super().forward(step, hidden, collective)
        vocab = self._layout.vocab
        if self.broken_id is not None and self.broken_id in vocab:
            found[..., self.broken_id - vocab.start] = np.nan
        return found

    def logits(
        self, step: Step, hidden: NDArray[np.float32] | None, collective: Collective
    ) -> StepLogits:
        found = self.forward(step, hidden, collective)
        if not self.ranks:
            return HostLogits(found, self._last(step))
        import torch

        from edge.backends.triton.device import Device, Mirror
        from edge.backends.triton.logits import DeviceLogits

        here = Device()
        kept = Mirror(here, found.size, torch.float32)
        kept.host[...] = found.reshape(-1)
        return DeviceLogits(here, kept, step, found.shape[-1], lambda: self._last(step))


@dataclass(kw_only=True)
class MadeUpBackend(NullBackend):
    """Remembers what it loaded."""

    broken_id: int | None = None
    ranks: bool = False
    """Logits are where a GPU's are, and ranked there."""
    programs: list[MadeUpProgram] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.ranks:  # here, and not while others wait for a step: importing takes seconds
            only_interpreted()
            import edge.backends.triton.logits  # noqa: F401

    def load(
        self,
        spec: ModelSpec,
        layout: ShardLayout,
        weights: ShardWeights,
        weight_format: WeightFormat,
        *,
        limits: StepLimits,
        kv_dtype: KvDtype = "float32",
        kv_tier: KVTier | None = None,
    ) -> MadeUpProgram:
        program = MadeUpProgram(
            spec,
            layout,
            weight_bytes=weights.manifest.total_bytes,
            limits=limits,
            kv_dtype=kv_dtype,
            kv_tier=kv_tier,
        )
        program.broken_id, program.ranks = self.broken_id, self.ranks
        self.programs.append(program)
        return program


LIMITS = StepLimits(context_tokens=64, chunk_tokens=16, requests=4, cached_tokens=256)
RUN = 6
REPORT_WITHIN_S = 60.0
"""Only a hanging session takes as long; it fails the test instead of holding it up."""


class CountingLink:
    """A link that counts the bytes it sends."""

    def __init__(self, inner: Link) -> None:
        self._inner = inner
        self.sent_bytes = 0

    @property
    def peer(self) -> str:
        return self._inner.peer

    def send(self, array: NDArray[Any]) -> None:
        self.sent_bytes += array.nbytes
        self._inner.send(array)

    def receive(self, into: NDArray[Any]) -> None:
        self._inner.receive(into)

    def exchange(self, outgoing: NDArray[Any], incoming: NDArray[Any]) -> None:
        self.sent_bytes += outgoing.nbytes
        self._inner.exchange(outgoing, incoming)

    def state(self) -> LinkState:
        return self._inner.state()

    def close(self) -> None:
        self._inner.close()


@dataclass(slots=True)
class Shards:
    """All sessions of a plan, and what they reported."""

    sessions: list[ShardEngine]
    reports: SimpleQueue[Event]
    links: list[CountingLink] = field(default_factory=list)
    told: list[Tokens] = field(default_factory=list)
    """The reports of `go_on`."""
    terms: dict[str, SamplingTerms] = field(default_factory=dict)
    logprobs: list[tuple[Logprobs | None, ...]] = field(default_factory=list)
    """Of the tokens of `generate`'s runs."""
    backends: list[MadeUpBackend] = field(default_factory=list)
    on_report: Callable[[Event], object] = lambda event: None
    """Called with each report before it can be had, on the compute thread that made it."""

    @property
    def programs(self) -> list[MadeUpProgram]:
        """Of the sessions, in order. Their compute threads use them."""
        return [backend.programs[-1] for backend in self.backends]

    def hear(self, event: Event) -> None:
        self.on_report(event)
        self.reports.put(event)

    def report(self) -> Event:
        """The next one."""
        return self.reports.get(timeout=REPORT_WITHIN_S)

    def each(self, act: Callable[[ShardEngine], object]) -> list[Event]:
        """Ask every session for something of which each reports the outcome."""
        for session in self.sessions:
            act(session)
        return [self.report() for _ in self.sessions]

    def reply(
        self,
        request: str,
        prompt: Sequence[int],
        count: int,
        *,
        known: int = 0,
        parameters: SamplingParameters = SamplingParameters(),  # noqa: B008  it is frozen
    ) -> list[int]:
        """The first tokens of a new request's reply: its prompt in chunks, then a run.

        known: tokens of the prompt that are computed already.
        """
        self.begin(request, parameters)
        size = LIMITS.chunk_tokens
        for first in range(known, len(prompt), size):
            tokens = tuple(prompt[first : first + size])
            rows = int(first + size >= len(prompt))
            entry = StepEntry(request=request, position=first, tokens=tokens, logit_rows=rows)
            found = list(self.tokens(Step(entries=(entry,))).tokens)
        return found + (self.go_on(request, [*prompt, *found], count - 1) if count > 1 else [])

    def go_on(
        self, request: str, tokens: Sequence[int], count: int, *, drafts: int = 0, behind: int = 0
    ) -> list[int]:
        """The tokens of a run of the request that has these. behind: computed tokens that it
        computes again."""
        start = len(tokens) - 1 - behind
        known = tuple(tokens[start:])
        entry = StepEntry(request=request, position=start, tokens=known, logit_rows=1)
        event: Event = self.step(Step(entries=(entry,), run=count, drafts=drafts))
        found: list[int] = []
        while True:
            assert isinstance(event, Tokens), event
            self.told.append(event)
            found += event.tokens
            if event.last:
                return found
            event = self.report()

    def begin(
        self,
        request: str,
        parameters: SamplingParameters,
        *,
        prompt_tokens: int = 0,
        logprobs: int | None = None,
        **terms: Any,
    ) -> None:
        """These are its terms, which its first step will carry. terms: further ones."""
        self.terms[request] = SamplingTerms(
            sampling=parameters,
            prompt_tokens=prompt_tokens,
            logprobs=logprobs,
            **{"end_ids": frozenset(), "max_new_tokens": 50, **terms},
        )

    def step(self, step: Step, masks: Mapping[str, Sequence[PackedMask]] = NO_MASKS) -> Event:
        """Queue a step everywhere; its first outcome."""
        first = [entry.request for entry in step.entries if entry.request in self.terms]
        terms = {request: self.terms.pop(request) for request in first}
        for session in self.sessions:
            session.step(step, terms, masks)
        return self.reports.get(timeout=REPORT_WITHIN_S)

    def tokens(self, step: Step, masks: Mapping[str, Sequence[PackedMask]] = NO_MASKS) -> Tokens:
        """The same of a step that gives tokens."""
        event = self.step(step, masks)
        assert isinstance(event, Tokens), event
        return event

    def finish(self, request: str) -> None:
        for session in self.sessions:
            session.finish(request)

    def generate(self, prompts: dict[str, list[int]]) -> dict[str, list[int]]:
        """One token of each prompt, in chunks, and then a run of all of them together."""
        answers: dict[str, list[int]] = {}
        for request, prompt in prompts.items():
            chunk = StepEntry(request=request, position=0, tokens=tuple(prompt[:-2]), logit_rows=0)
            rest = StepEntry(
                request=request,
                position=len(prompt) - 2,
                tokens=tuple(prompt[-2:]),
                logit_rows=1,
            )
            assert self.tokens(Step(entries=(chunk,))).tokens == ()
            answers[request] = list(self.tokens(Step(entries=(rest,))).tokens)
        entries = tuple(
            StepEntry(
                request=request,
                position=len(prompt),
                tokens=(answers[request][0],),
                logit_rows=1,
            )
            for request, prompt in prompts.items()
        )
        event: Event = self.step(Step(entries=entries, run=RUN))
        chosen_s = 0.0
        for number in range(1, RUN + 1):
            assert isinstance(event, Tokens), event
            assert event.last == (number == RUN)
            self.logprobs.append(event.logprobs)
            assert event.chosen_s >= chosen_s
            chosen_s = event.chosen_s
            for request, token in zip(prompts, event.tokens, strict=True):
                answers[request].append(token)
            if number < RUN:
                event = self.reports.get(timeout=REPORT_WITHIN_S)
        for request in prompts:
            self.finish(request)
        return answers

    @property
    def sent_bytes(self) -> int:
        return sum(link.sent_bytes for link in self.links)


@contextlib.contextmanager
def shards(
    columns: Sequence[int],
    *,
    kind: str = "memory",
    stage_before: bool = False,
    shortlist_tokens: int = SHORTLIST_TOKENS,
    broken_id: int | None = None,
    ranks: bool = False,
    wrap: Callable[[Link, Seat], Link] = lambda link, seat: link,
) -> Iterator[Shards]:
    """Sessions of a stage whose shards hold so many columns, perhaps behind a stage of one."""
    with linked(
        make_plan(columns, stage_before=stage_before),
        kind=kind,
        shortlist_tokens=shortlist_tokens,
        backend=lambda: MadeUpBackend(broken_id=broken_id, ranks=ranks),
        wrap=wrap,
    ) as found:
        yield found


@contextlib.contextmanager
def linked(
    plan: Plan,
    *,
    kind: str = "memory",
    limits: StepLimits = LIMITS,
    kv_dtype: KvDtype = "float32",
    shortlist_tokens: int = SHORTLIST_TOKENS,
    backend: Callable[[], MadeUpBackend] = MadeUpBackend,
    tier: Callable[[Seat], KVTier | None] = lambda seat: None,
    places: Callable[[Seat], PrefixStorage | None] = lambda seat: None,
    wrap: Callable[[Link, Seat], Link] = lambda link, seat: link,
    link_timeout_s: float = 30.0,
    drafter: Drafter | None = None,
) -> Iterator[Shards]:
    """A session for every shard of the plan of SPEC, loaded and linked.

    wrap: what the shard in a seat gets for each of its links.
    link_timeout_s: how long a neighbour may say nothing.
    drafter: of the sampler.
    """
    found = Shards([], SimpleQueue())
    num_stages = len(plan.stages)
    for stage, rank in seats(plan):
        assignment = Assignment(
            session="s",
            model=SPEC,
            plan=plan,
            stage=stage,
            rank=rank,
            weight_format=uniform_format("float32", 32, "fast"),
            manifest_digest="",
            weights_digest="w",
            limits=limits,
            kv_dtype=kv_dtype,
            wire_rules=WireRules(
                sums=(WireRule(),) * num_stages, hops=(WireRule(),) * (num_stages - 1)
            ),
        )
        found.sessions.append(
            ShardEngine(assignment, found.hear, shortlist_tokens=shortlist_tokens, drafter=drafter)
        )
    links: dict[Seat, dict[Seat, Link]] = {session.links.seat: {} for session in found.sessions}
    for first, second in itertools.combinations([each.links for each in found.sessions], 2):
        if second.seat in first.neighbours:
            names_of_ends = str(first.seat), str(second.seat)
            pair = link_ends(kind, *names_of_ends, timeout_s=link_timeout_s)
            ends = [CountingLink(end) for end in pair]
            found.links += ends
            links[first.seat][second.seat] = wrap(ends[0], first.seat)
            links[second.seat][first.seat] = wrap(ends[1], second.seat)
    names = {(stage, rank): f"device {stage}.{rank}" for stage, rank in seats(plan)}
    try:
        for session in found.sessions:
            seat = session.links.seat
            weights = ShardWeights(path=Path(), manifest=Manifest(tensors=(), total_bytes=0))
            found.backends.append(backend())
            session.load(found.backends[-1], weights, tier(seat), places(seat)).result()
            session.connect(links[seat], names)
        for prepared in [session.prepare() for session in found.sessions]:
            prepared.result(REPORT_WITHIN_S)
        yield found
    finally:
        for session in found.sessions:
            session.close()


def make_plan(columns: Sequence[int], *, stage_before: bool) -> Plan:
    bounds = [0, *itertools.accumulate(columns)]
    last = tuple(
        Shard(
            device=f"d{rank}",
            heads=range(rank, rank + 1) if rank + 1 < len(columns) else range(rank, 4),
            ffn_columns=range(4) if rank == 0 else range(4, 4),
            vocab=range(start, stop),
        )
        for rank, (start, stop) in enumerate(itertools.pairwise(bounds))
    )
    if not stage_before:
        return Plan(model="m", version=0, stages=(Stage(layers=range(2), shards=last),))
    first = Shard(device="before", heads=range(4), ffn_columns=range(4), vocab=range(VOCAB))
    return Plan(
        model="m",
        version=0,
        stages=(
            Stage(layers=range(1), shards=(first,)),
            Stage(layers=range(1, 2), shards=last),
        ),
    )


def seats(plan: Plan) -> list[Seat]:
    return [(s, r) for s, stage in enumerate(plan.stages) for r in range(len(stage.shards))]
