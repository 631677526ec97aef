"""The journal of one reply: what was asked, and its tokens so far, in a file that outlives us.

A file is lines, each with a checksum of all before it and of itself: first what was asked, then
what came. It is only ever appended to, so a cut leaves a beginning; and of a beginning the rest
follows, because tokens depend on nothing but what it holds. That is why no token is made durable:
what a loss of power takes is made again. A token took 3 µs, 14 with its likelihoods.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Self

from msgspec import Meta

from edge.coordinator.generation import GenerationRequest
from edge.coordinator.kept_prefixes import Span, Spans
from edge.errors import ProtocolError, RequestError
from edge.kernels.matmul_nbits.reference import Accuracy
from edge.kernels.sampling.logprobs import Logprobs
from edge.kernels.sampling.parameters import SamplingParameters
from edge.offload import parse_json, read_file
from edge.partition import Parallel, Plan
from edge.planning.load_options import ExpertCut, LoadOptions, Replan, Standby, Streaming
from edge.protocol.fields import from_json, to_json
from edge.protocol.lease import MOST_TERMS, Lease
from edge.protocol.step import MAX_END_IDS, FinishReason
from edge.protocol.wire_rules import Wire
from edge.text.answer_forms import AnswerForm
from edge.text.answer_parser import read_answer
from edge.text.answer_parts import ReadAnswer
from edge.text.grammar import MOST_GRAMMAR_BYTES, Grammar
from edge.weights.formats import KvDtype

VERSION = 5

MOST_BYTES = 8 << 20
"""Size limit of a file. A token takes 16 bytes, or 600 with its 20 likeliest tokens. Of a longer
file the beginning is kept."""

_ALIKE = (
    "dtype", "block_size", "accuracy", "wire", "kv_dtype", "context_tokens", "batch_invariant",
)  # fmt: skip
"""Options of a load on which tokens depend, apart from the weights."""

_MOST_TOKENS = 1 << 20
_MOST_VALUES_OF_A_TOKEN = 100
_DAMAGED = "it was damaged, or is no journal"


_Path = Annotated[str, Meta(max_length=4096)]
_Nats = Annotated[float, Meta(gt=-1e40, lt=1e40)]
"""Below 0, unlike other numbers of records."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptLoad:
    """How a model was loaded, as far as a later load must be like it, or had better be."""

    path: _Path
    fingerprint: str
    """Fingerprint of the checkpoint's files."""
    context_tokens: int
    dtype: str
    lora: _Path | None
    block_size: int | None
    accuracy: Accuracy
    wire: Wire
    kv_dtype: KvDtype
    parallel: Parallel
    """What was asked for where the plan was not made by hand."""
    plan: Plan
    """Devices by name: in which order sums are taken."""
    concurrency: int
    batch_invariant: bool
    share_prefixes: bool
    prefixes_of: tuple[str, ...] | None
    stream: Streaming
    experts: ExpertCut
    standby: Standby
    wait_for_peers_s: float
    replan: Replan

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
    ) -> KeptLoad:
        """names: of devices, by the ids that the plan has."""
        shared = {each.name for each in fields(cls)} & {each.name for each in fields(options)}
        lora = None if options.lora is None else str(Path(options.lora).absolute())
        values = {name: getattr(options, name) for name in shared} | {
            "context_tokens": context_tokens,
            "lora": lora,
            "plan": named_plan(plan, names),
            "wait_for_peers_s": float(options.wait_for_peers_s),
        }
        return cls(
            path=str(path.absolute()),
            fingerprint=fingerprint,
            parallel="auto" if isinstance(options.plan, Plan) else options.plan,
            **values,
        )

    def options(self) -> LoadOptions:
        """To load it in this way again, with a plan to be made. RequestError for what can never
        be."""
        shared = {each.name for each in fields(self)} & {each.name for each in fields(LoadOptions)}
        values = {name: getattr(self, name) for name in shared - {"plan"}}
        return LoadOptions(plan=self.parallel, **values)

    def unlike(self, loaded: KeptLoad) -> str | None:
        """What another load has otherwise that tokens depend on, in words; None: nothing."""
        for name in _ALIKE:
            wanted, found = getattr(self, name), getattr(loaded, name)
            if wanted != found:
                return f"{name} {found} instead of {wanted}"
        if (self.lora is None) != (loaded.lora is None):
            return f"the adapter {loaded.lora} instead of {self.lora}"
        return None


def named_plan(plan: Plan, names: Mapping[str, str]) -> Plan:
    """The plan with other words for its devices, where `names` has them."""
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
class Reading:
    """How the whole answer of a conversation is read."""

    thinking: bool
    form: AnswerForm
    tools: Mapping[str, Mapping[str, tuple[str, ...]]]
    """See ToolTypes."""

    def __call__(self, text: str) -> ReadAnswer:
        return read_answer(text, self.form, thinking=self.thinking, tools=self.tools)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRequest:
    """A GenerationRequest as a file holds it."""

    prompt_ids: Annotated[tuple[int, ...], Meta(max_length=_MOST_TOKENS)]
    max_new_tokens: int
    sampling: SamplingParameters
    stop: tuple[Annotated[str, Meta(max_length=1 << 16)], ...]
    end_ids: Annotated[frozenset[int], Meta(max_length=MAX_END_IDS)]
    logprobs: int | None
    grammar: Annotated[str, Meta(max_length=MOST_GRAMMAR_BYTES)] | None
    reading: Reading | None
    """None: all is said."""

    def __post_init__(self) -> None:
        self.request()

    @classmethod
    def of(cls, request: GenerationRequest, reading: Reading | None) -> KeptRequest:
        """`request` is the way back."""
        values = {each.name: getattr(request, each.name) for each in fields(request)}
        grammar = None if request.grammar is None else request.grammar.rules
        return cls(**{**values, "grammar": grammar, "reading": reading})

    def request(self) -> GenerationRequest:
        """Raises RequestError for what cannot be asked."""
        shared = [each.name for each in fields(GenerationRequest)]
        values: dict[str, Any] = {name: getattr(self, name) for name in shared}
        values["grammar"] = None if self.grammar is None else Grammar(self.grammar)
        return GenerationRequest(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a journal begins with."""

    begun_s: float
    """By the clock of the day."""
    load: KeptLoad
    request: KeptRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptToken:
    """A token of an answer, and why it was the last, if it was."""

    token_id: int
    end: FinishReason | None
    logprobs: Logprobs | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Holder:
    """Who goes on with a reply, from this line on."""

    lease: Lease
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Singly:
    """A span of the prompt's tokens that were computed one at a time."""

    singly: Span


@dataclass(frozen=True, slots=True, kw_only=True)
class _Told:
    """A token with more than its id."""

    token: int
    end: FinishReason | None
    logprob: _Nats | None
    top: tuple[tuple[int, _Nats], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What a journal holds."""

    asked: Asked
    lease: Lease
    """The lease of the coordinator that wrote it last."""
    pid: int
    """Process id of that coordinator."""
    tokens: tuple[KeptToken, ...]
    singly: Spans
    """See `Request`."""
    whole_bytes: int
    """Bytes of its file that are whole; what follows is the beginning of a line that was cut."""
    checksum: int
    """Checksum of these bytes."""

    @property
    def is_finished(self) -> bool:
        return bool(self.tokens) and self.tokens[-1].end is not None


def read_journal(path: Path) -> Kept:
    """Raises RequestError, saying what is wrong, for a file that no journal wrote, one that others
    can read, and one that cannot be read; FileNotFoundError where there is none."""
    try:
        _check_private(path.stat(follow_symlinks=False))
        return _parsed(read_file(path, MOST_BYTES))
    except FileNotFoundError:
        raise
    except (OSError, ValueError, ProtocolError) as error:
        raise RequestError(
            f"the reply in {path} cannot be gone on with: {error}",
            remedy="remove the file, or ask again",
        ) from error


def _check_private(status: os.stat_result) -> None:
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ValueError("others may read or write it, until it is yours and chmod 600")


def _holder(path: Path) -> str:
    """Who has it open, as far as it is written there yet."""
    try:
        return f"process {read_journal(path).pid}"
    except (RequestError, FileNotFoundError):
        return "another process"


def _parsed(content: bytes) -> Kept:
    whole = content[: content.rfind(b"\n") + 1]
    lines = whole.splitlines(keepends=True)
    checksum, asked, holder = 0, None, None
    tokens: list[KeptToken] = []
    singly: Spans = ()
    for number, line in enumerate(lines):
        told, _space, body = line[:-1].partition(b" ")
        checksum = zlib.crc32(body, checksum)
        if told != b"%08x" % checksum:
            raise ValueError(_DAMAGED)
        if number == 0:
            asked = _asked(body)
        elif body.isdigit() and len(body) < 16:
            tokens.append(KeptToken(token_id=int(body), end=None, logprobs=None))
        else:
            values = parse_json(body, most_values=_MOST_VALUES_OF_A_TOKEN)
            if isinstance(values, dict) and "lease" in values:
                holder = from_json(_Holder, values)
            elif isinstance(values, dict) and "singly" in values:
                singly = (*singly, from_json(_Singly, values).singly)
            else:
                tokens.append(_token(from_json(_Told, values)))
    if asked is None or holder is None:
        raise ValueError("it ends before what was asked does")
    if holder.lease.term >= MOST_TERMS:
        raise ValueError(_DAMAGED)
    request = asked.request
    ends = [each.end is not None for each in tokens]
    room = request.max_new_tokens - (not any(ends))
    if any(ends[:-1]) or len(tokens) > max(0, room):
        raise ValueError("it has tokens behind the last one")
    ends_of = [end for span in singly for end in span]
    if ends_of != sorted(set(ends_of)) or max(ends_of, default=0) > len(request.prompt_ids):
        raise ValueError(_DAMAGED)
    if any((each.logprobs is None) != (request.logprobs is None) for each in tokens):
        raise ValueError(_DAMAGED)
    return Kept(
        asked=asked,
        lease=holder.lease,
        pid=holder.pid,
        tokens=tuple(tokens),
        singly=singly,
        whole_bytes=len(whole),
        checksum=checksum,
    )


def _asked(body: bytes) -> Asked:
    values = parse_json(body)
    if not isinstance(values, dict) or "edge_reply" not in values:
        raise ValueError("it is no journal of a reply")
    if values["edge_reply"] != VERSION:
        raise ValueError("another version of Edge wrote it")
    return from_json(Asked, values)


def _token(told: _Told) -> KeptToken:
    logprobs = None if told.logprob is None else Logprobs(logprob=told.logprob, top=told.top)
    return KeptToken(token_id=told.token, end=told.end, logprobs=logprobs)


class Journal:
    """One reply's file, open and ours alone; may be used from any thread.

    What cannot be written, on a full disk for example, is left out with all that follows: `on_fail`
    is told once. The reply itself goes on.
    """

    def __init__(
        self, path: Path, descriptor: int, kept: Kept, on_fail: Callable[[str], None]
    ) -> None:
        """Use `begin` or `open`. Takes over the descriptor."""
        self.path = path
        self.kept = kept
        """As it was found."""
        self._descriptor = descriptor
        self._checksum, self._bytes = kept.checksum, kept.whole_bytes
        self._on_fail = on_fail
        self.is_open = self._is_writing = True
        self._mutex = threading.Lock()

    @property
    def id(self) -> str:
        """By which it is found again."""
        return self.path.stem

    @classmethod
    def begin(
        cls, path: Path, asked: Asked, lease: Lease, on_fail: Callable[[str], None]
    ) -> Journal:
        """A new file. Raises OSError where there can be none; FileExistsError: there is one."""
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW
        descriptor = os.open(path, flags, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            kept = Kept(
                asked=asked,
                lease=lease,
                pid=os.getpid(),
                tokens=(),
                singly=(),
                whole_bytes=0,
                checksum=0,
            )
            journal = cls(path, descriptor, kept, on_fail)
        except BaseException:
            os.close(descriptor)
            raise
        journal._append({"edge_reply": VERSION, **to_json(asked)})
        journal.held_by(lease)
        if not journal._is_writing:
            journal.remove()  # of what was asked, a part is of no use
        return journal

    @classmethod
    def open(cls, path: Path, on_fail: Callable[[str], None]) -> Journal:
        """To go on with it, as a term later: that is durable when this returns.

        Raises RequestError for one that another process has open, which is named, and what
        `read_journal` raises.
        """
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RequestError(
                    f"{_holder(path)} has this reply under way", remedy="wait for it, or end it"
                ) from None
            kept = read_journal(path)
            journal = cls(path, descriptor, kept, on_fail)
            os.ftruncate(descriptor, kept.whole_bytes)
            journal.held_by(replace(kept.lease, term=kept.lease.term + 1))
            os.fsync(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        return journal

    def held_by(self, lease: Lease) -> None:
        """Who goes on with it from now on, in this process."""
        self.kept = replace(self.kept, lease=lease, pid=os.getpid())
        self._append(to_json(_Holder(lease=lease, pid=os.getpid())))

    def begun(self, singly: Spans) -> None:
        """Before its first token: how its prompt was computed; see `Request`."""
        for span in singly:
            self._append(to_json(_Singly(singly=span)))

    def token(self, token_id: int, end: FinishReason | None, logprobs: Logprobs | None) -> None:
        """The next one."""
        if end is None and logprobs is None:
            self._append(token_id)
            return
        told = _Told(
            token=token_id,
            end=end,
            logprob=None if logprobs is None else logprobs.logprob,
            top=() if logprobs is None else logprobs.top,
        )
        self._append(to_json(told))

    def close(self) -> None:
        """It can be gone on with later. May be called again."""
        with self._mutex:
            if self.is_open:
                self.is_open = self._is_writing = False
                os.close(self._descriptor)

    def remove(self) -> None:
        """Nobody needs it any more. Where it cannot be, `on_fail` is told."""
        why = ""
        with self._mutex:
            if self.is_open:
                try:
                    self.path.unlink(missing_ok=True)
                except OSError as error:
                    why = error.strerror or str(error)
        self.close()
        if why:
            self._on_fail(f"{self.path} stays there, though nobody needs it any more: {why}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _append(self, value: object) -> None:
        body = json.dumps(value).encode()
        with self._mutex:
            if not self._is_writing:
                return
            checksum = zlib.crc32(body, self._checksum)
            line = b"%08x %s\n" % (checksum, body)
            why = ""
            if self._bytes + len(line) > MOST_BYTES:
                why = f"it is longer than {MOST_BYTES >> 20} MiB"
            else:
                try:
                    if os.write(self._descriptor, line) < len(line):
                        why = "the disk is full"
                except OSError as error:
                    why = error.strerror or str(error)
            self._checksum, self._bytes = checksum, self._bytes + len(line)
            self._is_writing = not why
        if why:
            self._on_fail(f"the rest of the answer is not kept in {self.path}: {why}")
