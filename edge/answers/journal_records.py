"""The content of a journal: how the model was loaded, the terms of the answer, and its tokens."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from edge.answers.terms import Terms
from edge.kernels.matmul_nbits.reference import Accuracy
from edge.kernels.sampling.logprobs import Logprobs
from edge.offload import parse_json
from edge.partition import Parallel, Plan
from edge.planning.load_options import ExpertCut, LoadOptions, Replan, Standby, Streaming
from edge.protocol.fields import from_json
from edge.protocol.lease import MOST_TERMS, Lease
from edge.protocol.step import FinishReason
from edge.protocol.wire_rules import Wire
from edge.scheduling.prefixes import Span, Spans
from edge.weights.formats import KvDtype

VERSION = 13

_ALIKE = (
    "dtype", "block_size", "accuracy", "wire", "kv_dtype", "context_tokens", "batch_invariant",
    "packs_blocks",
)  # fmt: skip
"""Options of a load on which tokens depend, apart from the weights."""

_MOST_VALUES_OF_A_TOKEN = 100
_DAMAGED = "it was damaged, or is no journal"


FilePath = Annotated[str, Meta(max_length=4096)]


_Nats = Annotated[float, Meta(gt=-1e40, lt=1e40)]
"""A log probability. It is negative, which other numbers of records are not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JournaledLoad:
    """How a model was loaded, so that a later load can be made like it."""

    path: FilePath
    fingerprint: str
    """Fingerprint of the checkpoint's files."""
    context_tokens: int
    dtype: str
    lora: FilePath | None
    draft: FilePath | None
    block_size: int | None
    accuracy: Accuracy
    wire: Wire
    kv_dtype: KvDtype
    parallel: Parallel
    """The kind of plan that was asked for; "auto" where the plan was made by hand."""
    plan: Plan
    """Its devices by name. Sums are taken in the order of the plan."""
    concurrency: int
    batch_invariant: bool
    share_prefixes: bool
    prefixes_of: tuple[str, ...] | None
    stream: Streaming
    experts: ExpertCut
    standby: Standby
    spot_check: float
    wait_for_peers_s: float
    replan: Replan
    packs_blocks: bool

    def __post_init__(self) -> None:
        self.options()

    @classmethod
    def of(
        cls,
        path: Path,
        fingerprint: str,
        options: LoadOptions,
        *,
        context_tokens: int,
        plan: Plan,
        names: Mapping[str, str],
    ) -> JournaledLoad:
        """names: device names by the ids in `plan`."""
        shared = {each.name for each in fields(cls)} & {each.name for each in fields(options)}
        lora = None if options.lora is None else str(Path(options.lora).absolute())
        draft = None if options.draft is None else str(options.draft)
        if draft is not None and Path(draft).exists():  # else a name
            draft = str(Path(draft).absolute())
        values = {name: getattr(options, name) for name in shared} | {
            "context_tokens": context_tokens,
            "lora": lora,
            "draft": draft,
            "plan": named_plan(plan, names),
            "spot_check": float(options.spot_check),
            "wait_for_peers_s": float(options.wait_for_peers_s),
        }
        return cls(
            path=str(path.absolute()),
            fingerprint=fingerprint,
            parallel="auto" if isinstance(options.plan, Plan) else options.plan,
            **values,
        )

    def options(self) -> LoadOptions:
        """Options for a load like it; the planner makes the plan. Raises RequestError for values
        that no load has."""
        shared = {each.name for each in fields(self)} & {each.name for each in fields(LoadOptions)}
        values = {name: getattr(self, name) for name in shared - {"plan"}}
        return LoadOptions(plan=self.parallel, **values)

    def unlike(self, loaded: JournaledLoad) -> str | None:
        """The first difference in `loaded` that tokens depend on, in words; None: there is none."""
        for name in _ALIKE:
            wanted, found = getattr(self, name), getattr(loaded, name)
            if wanted != found:
                return f"{name} {found} instead of {wanted}"
        if (self.lora is None) != (loaded.lora is None):
            return f"the adapter {loaded.lora} instead of {self.lora}"
        return None


def named_plan(plan: Plan, names: Mapping[str, str]) -> Plan:
    """The plan with its devices renamed by `names`; a device without a new name keeps its own."""
    return replace(
        plan,
        stages=tuple(
            replace(
                stage,
                shards=tuple(
                    shard.on(names.get(shard.device, shard.device)) for shard in stage.shards
                ),
            )
            for stage in plan.stages
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalHead:
    """The first line of a journal."""

    begun_s: float
    """Wall-clock time."""
    load: JournaledLoad
    terms: Terms


@dataclass(frozen=True, slots=True, kw_only=True)
class JournaledToken:
    """One token of the answer, and why it is the last one, if it is."""

    token_id: int
    end: FinishReason | None
    logprobs: Logprobs | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The line of a coordinator that computes the answer from there on."""

    lease: Lease
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SinglySpan:
    """The line of a span of the prompt that was computed one token at a time."""

    singly: Span


@dataclass(frozen=True, slots=True, kw_only=True)
class TogetherLine:
    """The line before a token: whether it and the next ones come of steps with guesses."""

    together: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLine:
    """The line of a token that has more than its id."""

    token: int
    end: FinishReason | None
    logprob: _Nats | None
    top: tuple[tuple[int, _Nats], ...]

    @classmethod
    def of(cls, token_id: int, end: FinishReason | None, logprobs: Logprobs | None) -> TokenLine:
        return cls(
            token=token_id,
            end=end,
            logprob=None if logprobs is None else logprobs.logprob,
            top=() if logprobs is None else logprobs.top,
        )

    def journaled(self) -> JournaledToken:
        logprobs = None if self.logprob is None else Logprobs(logprob=self.logprob, top=self.top)
        return JournaledToken(token_id=self.token, end=self.end, logprobs=logprobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalContent:
    """All that a journal holds."""

    head: JournalHead
    lease: Lease
    """Lease of the coordinator that wrote to it last."""
    pid: int
    """Process id of that coordinator."""
    tokens: tuple[JournaledToken, ...]
    singly: Spans
    together: Spans
    """See `Answer`, like the one before."""
    ends_together: bool
    """The next token comes of a step with guesses, unless a line before it says otherwise."""
    whole_bytes: int
    """Bytes of the complete lines of the file. A line that was cut may follow them."""
    checksum: int
    """Checksum of these bytes."""


def parse_journal(content: bytes) -> JournalContent:
    """The content of a journal file. Raises ValueError or ProtocolError, saying what is wrong."""
    whole = content[: content.rfind(b"\n") + 1]
    checksum, head, holder = 0, None, None
    tokens: list[JournaledToken] = []
    singly: Spans = ()
    together: list[int] = []
    """Tokens that come of steps with guesses."""
    is_together = False
    for number, line in enumerate(whole.splitlines(keepends=True)):
        told, _space, body = line[:-1].partition(b" ")
        checksum = zlib.crc32(body, checksum)
        if told != b"%08x" % checksum:
            raise ValueError(_DAMAGED)
        if number == 0:
            head = _head(body)
        elif body.isdigit() and len(body) < 16:
            tokens.append(JournaledToken(token_id=int(body), end=None, logprobs=None))
            together += [len(tokens) - 1] * is_together
        else:
            values = parse_json(body, most_values=_MOST_VALUES_OF_A_TOKEN)
            if isinstance(values, dict) and "lease" in values:
                holder = from_json(Holder, values)
            elif isinstance(values, dict) and "singly" in values:
                singly = (*singly, from_json(SinglySpan, values).singly)
            elif isinstance(values, dict) and "together" in values:
                is_together = from_json(TogetherLine, values).together
            else:
                tokens.append(from_json(TokenLine, values).journaled())
                together += [len(tokens) - 1] * is_together
    if head is None or holder is None:
        raise ValueError("it is cut inside its first lines")
    if holder.lease.term >= MOST_TERMS:
        raise ValueError(_DAMAGED)
    _check(head.terms, tokens, singly)
    if together[:1] == [0]:
        raise ValueError(_DAMAGED)  # the first token comes of the prompt
    return JournalContent(
        head=head,
        lease=holder.lease,
        pid=holder.pid,
        tokens=tuple(tokens),
        singly=singly,
        together=_spans(len(head.terms.prompt) - 1, together),
        ends_together=is_together,
        whole_bytes=len(whole),
        checksum=checksum,
    )


def _spans(first: int, numbers: Iterable[int]) -> Spans:
    """The spans of these ascending numbers, counted from `first`."""
    spans: list[Span] = []
    for number in numbers:
        begin = first + number
        if spans and spans[-1][1] == begin:
            begin = spans.pop()[0]
        spans.append((begin, first + number + 1))
    return tuple(spans)


def _check(terms: Terms, tokens: list[JournaledToken], singly: Spans) -> None:
    """Raises ValueError for tokens and spans that no answer to these terms has."""
    ends = [each.end is not None for each in tokens]
    room = terms.max_new_tokens - (not any(ends))
    if any(ends[:-1]) or len(tokens) > max(0, room):
        raise ValueError("it has tokens behind the last one")
    bounds = [bound for span in singly for bound in span]
    if bounds != sorted(set(bounds)) or max(bounds, default=0) > len(terms.prompt):
        raise ValueError(_DAMAGED)
    if any((each.logprobs is None) != (terms.logprobs is None) for each in tokens):
        raise ValueError(_DAMAGED)


def _head(body: bytes) -> JournalHead:
    values = parse_json(body)
    if not isinstance(values, dict) or "edge_reply" not in values:
        raise ValueError("it is no journal of a reply")
    if values["edge_reply"] != VERSION:
        raise ValueError("another version of Edge wrote it")
    head = from_json(JournalHead, values)
    if head.terms.rows is not None:
        raise ValueError(_DAMAGED)
    return head
