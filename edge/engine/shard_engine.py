"""The engine of one loaded shard: what a coordinator can ask of it.

The data plane lives here: blocking links, used by the compute thread only. The control plane queues
work for that thread and gets events through a callback.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from edge import transport
from edge.backends.interface import Backend, KvStorage, ShardWeights, StageProgram
from edge.engine.compute_thread import ComputeThread
from edge.engine.distributed_sampling import DistributedSampling
from edge.engine.draft_model import DraftModel
from edge.engine.draft_server import DraftServer
from edge.engine.drafter import Drafter, SuffixLookup
from edge.engine.further_drafter import FurtherHeadDrafter, load_further
from edge.engine.kv_calibration import calibration_step
from edge.engine.kv_copies import KvCopies, KvCopyQuota, KvCopyQuotaShare, put_copy
from edge.engine.prefix_cache import PrefixCache, PrefixStorage
from edge.engine.prefix_pieces import StoredPieces
from edge.engine.run_loop import RunLoop
from edge.engine.shard_links import ShardLinks
from edge.engine.speculation import Speculator
from edge.engine.timing import ShardCounters
from edge.engine.waiting_rows import WaitingRows
from edge.errors import PlanError, RequestError
from edge.kernels.sampling.shortlist import SHORTLIST_TOKENS
from edge.memory.step_memory import rewinds
from edge.memory.windows import cut_end
from edge.offload import KVTier, StoreError
from edge.protocol import kv_frames, prefix_frames
from edge.protocol.assignment import Assignment
from edge.protocol.error_codec import Failed, map_store_error
from edge.protocol.frame_codec import Event
from edge.protocol.step import SamplingTerms, Speculation, Step
from edge.protocol.step_times import DRAFT_ROWS, ExpectedStep, StepTimes, TokenSteps
from edge.protocol.token_masks import PackedMask
from edge.protocol.topology import Seat
from edge.transport import Link
from edge.transport.frame import Buffer
from edge.weights.layout import ShardLayout, gets_pictures, looks_up_pictures
from edge.weights.observation import observed_runs

_log = logging.getLogger(__name__)

Stored = TypeVar("Stored")

STORED_WITHIN_S = 0.2
"""Seconds in which prefixes are stored while replies wait for another plan."""

NO_TERMS: Mapping[str, SamplingTerms] = {}
NO_MASKS: Mapping[str, Sequence[PackedMask]] = {}


class ShardEngine:
    """One shard of one model for one coordinator. `report` may be called from any thread."""

    def __init__(
        self,
        assignment: Assignment,
        report: Callable[[Event], None],
        *,
        shortlist_tokens: int = SHORTLIST_TOKENS,
        copy_quota: KvCopyQuotaShare | None = None,
        expected: ExpectedStep | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        """expected: predicted step times. drafter: guesses tokens; None: a SuffixLookup."""
        self.assignment = assignment
        self.layout: ShardLayout = assignment.layout
        self._report = report
        self._times = ShardCounters(expected)
        limits = assignment.limits
        self._num_observed = len(observed_runs(self.layout)) if limits.observes else 0
        self.links = ShardLinks(assignment, self._times)
        self._choice = DistributedSampling(
            [shard.vocab for shard in assignment.plan.stages[-1].slices],
            assignment.rank,
            shortlist_tokens=shortlist_tokens,
        )
        has_own_states = self._has_states = rewinds(assignment.model, assignment.kv_dtype)
        self.draft_model = DraftModel(assignment.model.vocab_size)
        """Asked for guesses, where this shard samples and is linked with a draft model."""
        self._draft_server: DraftServer | None = None
        """Guesses for another model."""
        self._drafters: dict[Speculation, Drafter] = {
            "lookup": drafter or SuffixLookup(),
            "draft": self.draft_model,
        }
        self._further: FurtherHeadDrafter | None = None
        self._speculator = Speculator(
            self._drafters,
            has_experts=assignment.model.has_experts,
            rewinds=has_own_states,
            predicted=dict(
                zip(DRAFT_ROWS, () if expected is None else expected.draft_steps_s, strict=False)
            ),
        )
        chunks = len(assignment.plan.stages) + 2  # under way, and the next one
        self.pictures = WaitingRows(
            assignment.model.hidden_size,
            most=chunks * limits.chunk_tokens,
            is_awaited=gets_pictures(assignment.model, self.layout, assignment.rank),
            is_embedded=looks_up_pictures(self.layout, assignment.rank),
            picture_layers=assignment.model.picture_layers,
            added=assignment.model.of_pictures(self.layout.layers),
        )
        self._runs = RunLoop(
            self.links,
            self.pictures,
            self._choice,
            self._speculator,
            self._times,
            report,
            self._copy,
            is_last_stage=self.layout.is_last_stage,
            rewinds=has_own_states,
            cut_end=cut_end(assignment.model),
        )
        self._program: StageProgram | None = None
        self._prefixes: PrefixCache | None = None
        self._awaited: Future[bool] | None = None
        """The write after which what is left of ended requests is written."""
        self._pieces: StoredPieces | None = None
        self._copies = (
            None
            if assignment.copies_kv == "none"
            else KvCopies(report, copy_quota or KvCopyQuota().of(None), assignment.copies_kv)
        )
        self._begun_s: dict[str, float] = {}
        """Start times of the requests under way, for the log."""
        self._is_over = False
        """It has failed or is closed. After a failed step the shards are out of step, so nothing
        runs any more."""
        self._is_sound = True
        """Whether it is intact: a failure came from other devices, so another session may adopt its
        program."""
        self._parks = False
        self._thread = ComputeThread(
            f"edge-compute-{assignment.session[:8]}", at_end=self._free_all
        )

    def load(
        self,
        backend: Backend,
        weights: ShardWeights,
        kv_tier: KVTier | None = None,
        prefixes: PrefixStorage | None = None,
    ) -> Future[int]:
        """Load the program on the compute thread, unless one was adopted. The future gives the
        bytes of its weights.

        kv_tier: where keys and values are swapped to. prefixes: storage of the prefix cache.
        """
        if prefixes is not None:
            self._prefixes = PrefixCache(prefixes, self.assignment)
            self._pieces = StoredPieces(self._prefixes)

        def work() -> int:
            self._program = self._program or backend.load(
                self.assignment.model,
                self.layout,
                weights,
                self.assignment.weight_format,
                limits=self.assignment.limits,
                kv_dtype=self.assignment.kv_dtype,
                kv_tier=kv_tier,
            )
            self._further = load_further(self.assignment, backend, weights)
            if self._further is None:
                return self._program.weight_bytes
            self._drafters["mtp"] = self._speculator.follower = self._further
            return self._program.weight_bytes + self._further.weight_bytes

        return self._thread.call(work)

    def resume(self, parked: StageProgram) -> None:
        """Adopt a parked program of an equal assignment. This shard owns it from now on and closes
        it."""
        self._program = parked

    def connect(self, links: Mapping[Seat, Link], names: Mapping[Seat, str]) -> None:
        """Take over the links to all neighbours. `names`: their devices' names, for messages."""
        self.links.connect(links, names)
        self._choice.collective = self.links.collective

    def prepare(self) -> Future[str]:
        """Agree how to sum, and calibrate a quantised KV cache. All shards do it together, once
        linked and before any request. The future gives the digest of the KV cache."""

        def work() -> str:
            assignment, program = self.assignment, self._program
            if program is None:
                return ""
            try:
                self.links.sum_on_devices(program.device_sums)
                if assignment.kv_dtype != "float32":
                    step = calibration_step(assignment.model, assignment.limits)
                    self._runs.compute(step, program)
                    program.calibrate(step.entries[0].request)
                    self._times.take()
            except transport.TransportError as error:
                raise self.links.error(error) from error
            return program.cache_digest

        return self._thread.call(work)

    def stream(self, layers: int) -> Future[None]:
        """Read `layers` layers from disk for each step. Happens between two steps, also of a
        run."""

        def work() -> None:
            if self._program is not None and not self._is_over:  # otherwise it is about to be freed
                self._program.stream(layers)

        done = self._thread.at_safe_point(work)
        self.layout = self.assignment.layout.streaming(layers)  # for a program that is loaded later
        return done

    def gram(self, run: int) -> Future[NDArray[np.float32]]:
        """A copy of the sums of one observed run of inputs, taken between two steps.

        Raises RequestError if the shard observes nothing or has no such run.
        """
        if not 0 <= run < self._num_observed:
            raise RequestError(f"run {run} of inputs is not observed")

        def work() -> NDArray[np.float32]:
            if self._program is None:
                raise PlanError("the shard is not loaded")
            return self._program.gram(run).copy()

        return self._thread.at_safe_point(work)

    def measure(self) -> Future[tuple[StepTimes, StepTimes]]:
        """Times of prefill and decode steps since the last call, taken between two steps, also of a
        run.

        They include each step whose token was reported: this shard is at that step or past it.
        """
        return self._thread.at_safe_point(self._times.take)

    def count_steps(self) -> Future[TokenSteps]:
        """Times of decode steps since the load, taken between two steps, also of a run."""
        return self._thread.at_safe_point(self._times.count)

    def slower(self, *, within_s: float) -> float | None:
        """Time of recent steps relative to the prediction. None if no step was within
        `within_s`."""
        return self._times.pace.slower(now_s=time.perf_counter(), within_s=within_s)

    def step(
        self,
        step: Step,
        terms: Mapping[str, SamplingTerms] = NO_TERMS,
        masks: Mapping[str, Sequence[PackedMask]] = NO_MASKS,
    ) -> None:
        """Queue a step; its outcome comes through `report`.

        terms: those of requests that want tokens, with their first step; for the others logits are
        reported. masks: tokens that may come next, by rows, for constrained requests. Only shards
        of the last stage use the two, and each of them needs both.
        """
        for request in terms:
            self._begun_s[request] = time.monotonic()
            _log.debug("request %s begins", request, extra={"request": request})
        if self.layout.is_last_stage:
            for request, each in terms.items():
                self._choice.begin(request, each)
        if self._copies is not None:
            for request, each in terms.items():
                copies_all = self.assignment.copies_kv == "all"
                self._copies.begin(request, 0 if copies_all else each.prompt_tokens)

        def work(program: StageProgram | None) -> None:
            if program is None:
                raise PlanError("a step came before the shard was loaded")
            self._choice.allow(step, masks)
            self._thread.safe_point()
            for _computed in self._runs.run(step, program):
                if self._prefixes is not None:
                    self._prefixes.keep(program)
                self._thread.safe_point()
                if self._is_over:  # closing ends a run as well
                    return

        self._post(work)

    def serve_drafts(self, link: Link) -> None:
        """Guess the tokens of a larger model for its sampler at the other end, in place of an
        earlier one. For a shard that is a whole model."""
        self._end_drafts()
        assignment = self.assignment
        self._draft_server = DraftServer(
            link, assignment.limits, assignment.model.vocab_size, self._post
        )
        if self._is_over:
            link.close()

    def _end_drafts(self) -> None:
        self.draft_model.close()
        if self._draft_server is not None:
            self._draft_server.close()

    def _copy(self, step: Step) -> None:
        program = self._program
        if self._copies is not None and program is not None and not self._has_states:
            self._copies.take(step, program, now_s=time.monotonic())

    @property
    def rows_agree(self) -> bool:
        """See StageCompute. For a loaded shard."""
        return self._program is not None and self._program.rows_agree

    @property
    def batches_agree(self) -> bool:
        """See StageCompute. For a loaded shard."""
        return self._program is not None and self._program.batches_agree

    @property
    def mixes(self) -> bool:
        """See StageCompute. For a loaded shard."""
        return self._program is not None and self._program.mixes

    @property
    def is_working(self) -> bool:
        """Whether the compute thread is busy, waits for neighbours included."""
        return self._thread.is_working

    def at_turn(self, work: Callable[[], None]) -> None:
        """Run quick work that raises nothing on the compute thread, after everything queued so
        far."""
        self._thread.post(work)

    def yield_run(self) -> None:
        """End the run after its current token: others are waiting."""
        self._runs.yield_run()

    def swap_out(self, request: str) -> None:
        """Move the request's keys and values out of memory until its next step.

        Reports `SwappedOut`, with a reason if there is no room for them.
        """
        self._keep_on_disk(kv_frames.SwappedOut, request, lambda kv: kv.swap_out(request))

    def reserve(self, request: str, tokens: int) -> None:
        """Reserve room out of memory for `tokens` tokens of the request. Reports `Reserved`, with a
        reason if there is none."""
        self._keep_on_disk(kv_frames.Reserved, request, lambda kv: kv.reserve(request, tokens))

    def match_prefix(
        self,
        request: str,
        prompt: NDArray[np.int64],
        *,
        salt: str = "",
        source: str | None = None,
        tokens: int = 0,
        moves: bool = False,
    ) -> None:
        """Find the longest cached prefix of the prompt. Reports `PrefixMatched`.

        salt: only blocks stored with an equal salt match. source: a request in memory that has the
        same first `tokens` tokens; see `KvStorage.take`. Without one, a model with states restores
        those at `tokens`.
        """

        def work(program: StageProgram | None) -> None:
            if program is None:
                return
            found, ids = 0, tuple(prompt.tolist())
            if self.layout.is_last_stage:
                self._choice.recall(request, ids)
            if source is not None:
                program.release(request)  # an earlier look may have filled it
                found = program.take(request, source, tokens, moves=moves)
            points: tuple[int, ...] = ()
            stored: tuple[int, ...] = ()
            if self._prefixes is not None:
                found = self._prefixes.match(
                    program,
                    request,
                    ids,
                    salt=salt,
                    known=found,
                    moved=source if moves else None,
                    point=tokens if source is None else 0,
                )
                if source is None and not tokens:
                    points, stored = self._prefixes.points(request)
            self._report(
                prefix_frames.PrefixMatched(
                    request=request, tokens=found, points=points, stored=stored
                )
            )

        self._post(work)

    def stored_prefix(self, work: Callable[[StoredPieces], Stored]) -> Future[Stored]:
        """Work on the stored pieces of prefixes, after everything queued so far. Raises
        RequestError if there is no prefix cache."""

        def guarded() -> Stored:
            if self._pieces is None or self._is_over:
                raise RequestError("this shard has no prefix cache")
            return work(self._pieces)

        return self._thread.call(guarded)

    def put_kv(self, request: str, first: int, tokens: Sequence[int], rows: Buffer) -> Future[None]:
        """Restore keys and values of tokens that follow the request's cached ones; see `KvRows`.

        Raises RequestError for another position or size.
        """

        def work() -> None:
            if self._program is None or self._is_over:
                raise RequestError("keys and values came before the shard was loaded")
            if self._has_states:
                raise RequestError("keys and values alone do not restore a model with states")
            put_copy(self._program, request, first, len(tokens), rows)
            if self.layout.is_last_stage:
                self._choice.extend(request, tokens)
            if self._copies is not None:
                self._copies.restored(request, first + len(tokens))

        return self._thread.call(work)

    def save_state(self, request: str, tokens: int, place: int) -> None:
        """Copy the request's state after everything queued so far; see `KvStorage.save_state`."""

        def work(program: StageProgram | None) -> None:
            if program is not None:
                self._runs.hear_of(request, program)
                program.save_state(request, tokens, place)

        self._post(work)

    def finish(
        self, request: str, *, kept_tokens: int = 0, answer: NDArray[np.int64] | None = None
    ) -> None:
        """Free the request; a run that contains it ends after its current token.

        kept_tokens: tokens of its KV cache that stay until it is finished again. answer: those of
        them that follow the matched prompt.
        """
        self._choice.cancel(request)
        if (begun_s := self._begun_s.pop(request, None)) is not None:
            _log.debug(
                "request %s is over, after %.3f s",
                request, time.monotonic() - begun_s, extra={"request": request},
            )  # fmt: skip

        def work() -> None:
            try:
                if self._program is not None and not self._is_over:
                    self._runs.hear_of(request, self._program)
            except Exception as error:  # what the sampler told may be malformed
                self._fail(error)
            self._choice.forget(request)
            self._speculator.forget(request)
            self.pictures.forget(request)
            if self._pieces is not None:
                self._pieces.forget(request)
            if self._copies is not None:
                self._copies.forget(request)
            if self._program is not None:
                if self._prefixes is not None:
                    if not self._is_over:
                        self._prefixes.keep(self._program)
                    said = () if answer is None else tuple(answer.tolist())
                    self._prefixes.forget(request, kept_tokens=kept_tokens, answer=said)
                if kept_tokens:
                    self._program.keep(request, kept_tokens)
                    self._keep_prefixes(self._program)
                else:
                    self._program.release(request)

        self._thread.post(work)

    def _keep_prefixes(self, program: StageProgram | None) -> None:
        """Store what is kept of ended requests on disk, also where no step follows."""
        if self._prefixes is None or program is None or self._is_over:
            return
        writing = self._prefixes.keep(program)
        if writing is not None and writing is not self._awaited:
            self._awaited = writing
            writing.add_done_callback(lambda _done: self._post(self._keep_prefixes))

    def close(self, *, parks: bool = False) -> StageProgram | None:
        """End the waits and the compute thread, and free everything. Blocks until that is done.

        parks: return the program instead of closing it, if another session may adopt it.
        """
        self._parks = parks
        self._is_over = True
        self.links.close()
        self._end_drafts()
        if self._program is not None:
            self._program.interrupt()  # a prefill chunk may take seconds
        self._thread.close()
        program, self._program = self._program, None
        return program

    def _keep_on_disk(
        self,
        event: type[kv_frames.SwappedOut | kv_frames.Reserved],
        request: str,
        keep: Callable[[KvStorage], None],
    ) -> None:
        def work(program: StageProgram | None) -> None:
            if program is None:
                return
            self._runs.hear_of(request, program)
            why_not = None
            try:
                keep(program)
            except StoreError as error:
                why_not = str(error)
            self._report(event(request=request, why_not=why_not))

        self._post(work)

    def _post(self, work: Callable[[StageProgram | None], None]) -> None:
        """Queue work. The first error is reported, and nothing runs after it."""

        def guarded() -> None:
            if self._is_over:
                return
            try:
                work(self._program)
            except Exception as error:  # back ends raise errors of their libraries
                self._fail(error)

        self._thread.post(guarded)

    def _fail(self, error: Exception) -> None:
        if not self._is_over:
            self._is_over = True
            if isinstance(error, transport.TransportError):
                error = self.links.error(error)
            else:
                self._is_sound = False
            self._report(Failed.of(map_store_error(error)))

    def _free_all(self) -> None:
        self.links.close()  # again: `prepare` may have replaced the collective
        self._store_prefixes()
        if self._further is not None:
            self._further.close()
        if not (self._parks and self._is_sound and self._reset()):
            program, self._program = self._program, None
            try:
                if program is not None:
                    program.close()
            except Exception:  # back ends raise errors of their libraries
                _log.exception("closing a program failed")

    def _store_prefixes(self) -> None:
        """Store prefixes for later sessions, and for this one's replies on another plan."""
        if self._prefixes is None:
            return
        try:
            program = self._program if self._is_sound else None
            self._prefixes.close(program, within_s=STORED_WITHIN_S if self._parks else None)
        except Exception:  # back ends raise errors of their libraries
            _log.info("prefixes were not cached", exc_info=True)

    def _reset(self) -> bool:
        try:
            return self._program is not None and self._program.reset()
        except Exception:  # back ends raise errors of their libraries
            _log.info("a program cannot be parked for another session", exc_info=True)
            return False
