"""The run loop: the steps of one shard, each made from the tokens of the one before.

Used by the compute thread, except `yield_run`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from edge.backends.interface import StageCompute, StageProgram, StepLogits
from edge.engine.distributed_sampling import Chosen, DistributedSampling
from edge.engine.draft_runs import DraftRuns
from edge.engine.shard_links import ShardLinks
from edge.engine.speculation import Speculator
from edge.engine.timing import ShardCounters
from edge.engine.waiting_rows import WaitingRows
from edge.protocol import step_frames
from edge.protocol.frame_codec import Event
from edge.protocol.step import FinishReason, Guesses, Step

END_OF_RUN = -1
"""Sent instead of a token when a run, or a single step, ends."""

ASK_FOR_LOGITS = -2
"""Sent to the last stage instead of a token: send all logits of this step, then listen again."""


class RunLoop:
    """Runs the steps of one shard and reports the sampled tokens."""

    def __init__(
        self,
        links: ShardLinks,
        pictures: WaitingRows,
        choice: DistributedSampling,
        speculator: Speculator,
        times: ShardCounters,
        report: Callable[[Event], None],
        computed: Callable[[Step], None],
        *,
        is_last_stage: bool,
        rewinds: bool,
        cut_end: Callable[[int], int] | None = None,
    ) -> None:
        """computed: called after each step and before its tokens are reported, so that what it
        sends arrives first. rewinds: requests have states; see `Step.drafting`. cut_end: see
        `DraftRuns`."""
        self._links = links
        self._pictures = pictures
        self._choice = choice
        self._times = times
        self._report = report
        self._computed = computed
        self._is_last_stage = is_last_stage
        self._rewinds = rewinds
        self._speculator = speculator
        self._must_yield = False
        self._drafts = DraftRuns(
            links=links,
            choice=choice,
            speculator=speculator,
            times=times,
            compute=self.compute,
            follow=self._follow,
            computed=computed,
            report=self._tell_tokens,
            must_yield=lambda: self._must_yield,
            rewinds=rewinds,
            cut_end=cut_end,
            goes_ahead=not rewinds and choice.is_alone and links.seat[0] > 0,
        )

    def yield_run(self) -> None:
        """End the run after its current token: others are waiting. For any thread."""
        self._must_yield = True

    def run(self, step: Step, program: StageProgram) -> Iterator[Step]:
        """Run the step, and for a run the steps that follow. Yields each once it is computed."""
        self._drafts.before(step, program)
        if step.singly:
            yield from self._compute_apart(step, program)
            return
        if step.drafts and step.batch == 1:
            yield from self._drafts.run(step, program)
            self._must_yield = False
            return
        following: Step | None = step
        begun_s = 0.0
        while following is not None:
            step = following
            self._times.begin(is_decode=step.is_decode)
            logits = self.compute(step, program)
            start_s = time.perf_counter()
            if step.is_decode and begun_s:
                self._speculator.shared_seconds.note(step.batch, start_s - begun_s)
            begun_s = start_s
            if logits is not None and self._links.is_sampler:
                following = self._sample_and_tell(step, logits)
            elif logits is not None:
                self._choice.offer(step, logits)
            self._times.now.sample_s += time.perf_counter() - start_s
            if not self._links.is_sampler:
                self._computed(step.cut(step.spare))
                following = self._hear(step, logits)
            if step.spare:
                program.cut(step.entries[0].request, step.entries[0].end - step.spare)
            yield step

    def _compute_apart(self, step: Step, program: StageCompute) -> Iterator[Step]:
        """Run a step with `singly` as steps of one token each."""
        for each in step.apart:
            self._times.begin(is_decode=True)
            self.compute(each, program)
            self._computed(each)
            if self._is_last_stage:
                self._choice.remember(each)
            yield each
        if self._links.is_sampler:
            self._report(
                step_frames.Tokens(tokens=(), ends=(), last=True, chosen_s=time.monotonic())
            )

    def compute(self, step: Step, program: StageCompute) -> StepLogits | None:
        """Receive from the previous stage, compute, send to the next. The last stage returns
        logits."""
        hidden: NDArray[np.float32] | None = None
        times, collective = self._times.now, self._links.collective
        start_s = time.perf_counter()
        hidden = self._pictures.take(step, program)
        if self._links.seat[0] > 0:
            hidden = program.receive_buffer(step)
            self._links.receive_hidden(hidden)
        received_s, reduced_s = time.perf_counter(), times.reduce_s
        loaded_s, reads = program.disk_wait_s, program.weight_reads
        logits: StepLogits | None = None
        output: NDArray[np.float32] | None = None
        if self._is_last_stage:
            logits = program.logits(self._with_states(step), hidden, collective)
        else:
            output = program.forward(step, hidden, collective)
        computed_s = time.perf_counter()
        if output is not None:
            self._links.send_hidden(output)
        times.steps += 1
        times.receive_s += received_s - start_s
        load_s = program.disk_wait_s - loaded_s
        times.load_s += load_s
        read = program.weight_reads
        times.read_bytes += read.nbytes - reads.nbytes
        times.experts += read.experts - reads.experts
        times.experts_read += read.experts_read - reads.experts_read
        compute_s = computed_s - received_s - (times.reduce_s - reduced_s) - load_s
        self._times.computed(step, compute_s, now_s=computed_s)
        times.send_s += time.perf_counter() - computed_s
        return logits

    def _is_followed(self, step: Step) -> bool:
        """Whether a drafter is told the step's hidden states."""
        is_told = self._speculator.follower is not None and self._links.is_sampler
        return is_told and not step.states and self._choice.way(step) == "mtp"

    def _with_states(self, step: Step) -> Step:
        """The step, or one for the states of all of its rows, which gives the same logits. Those
        before a draft were told in the step before."""
        has_all = step.drafted > 0 or step.num_tokens == step.logit_rows
        return step if has_all or not self._is_followed(step) else step.of_states()

    def _follow(self, step: Step, own: StepLogits, count: int) -> None:
        """Tell a drafter the hidden states of tokens that stay. count: tokens that it gave."""
        follower = self._speculator.follower
        if follower is not None and self._is_followed(step):
            (entry,), states = step.entries, own.states()[0]
            first = step.num_tokens - len(states)
            rows = count if step.drafted else len(states) - step.spare
            tokens = entry.tokens[first : first + rows]
            follower.follow(entry.request, entry.position + first, tokens, states[:rows])

    def _hear(self, step: Step, own: StepLogits | None) -> Step | None:
        """The next step of a run, as told by the sampler. None at the end of the run.

        The sampler may first ask a shard of its stage for `own`, its logits.
        """
        may_ask = self._is_last_stage and self._choice.may_ask(step)
        if not (step.run > 1 or may_ask):
            return None
        told = np.zeros(step.batch, np.int64)
        start_s = time.perf_counter()
        self._links.hear(told)
        if own is not None and may_ask and told[0] == ASK_FOR_LOGITS:
            self._choice.send_logits(own)
            self._links.hear(told)
        self._times.now.receive_s += time.perf_counter() - start_s
        tokens = told[: len(step.answers)].tolist()
        return None if told[0] == END_OF_RUN else step.following(tokens)

    def _sample_and_tell(self, step: Step, own: StepLogits) -> Step | None:
        """Sample tokens and send them to the other shards, then to the coordinator. Returns the
        next step."""
        if step.states:
            states = self._choice.gather_states(step, own)
            self._computed(step)
            self._report(step_frames.States(rows=states.tobytes()))
            return None
        if self._choice.wants_logits(step):  # of the step's only request
            rows = self._choice.gather_logits(own)[:, : step.logit_rows]
            self._computed(step)
            self._report(step_frames.Logits(rows=rows.tobytes()))
            return None

        def ask_all() -> None:
            self._links.tell_stage(np.full(step.batch, ASK_FOR_LOGITS, np.int64))

        chosen = self._choice.choose(step, own, ask_all)
        if (known := self._choice.prompt_so_far(step)) is not None:
            tokens_so_far, terms = known
            self._speculator.foresee(step.entries[-1].request, tokens_so_far, terms.speculate)
        chosen_s = time.monotonic()
        tokens = [each.token for each in chosen]
        ends = self._choice.take(step, tokens)
        self._follow(step, own, len(tokens))
        guesses = self._guess(step, tokens, ends)
        is_over = self._must_yield or any(ends) or self._choice.ends_run(step) or step.run == 1
        is_over |= self._are_faster_in_turn(guesses)
        told = np.full(step.batch, END_OF_RUN, np.int64)
        if not is_over:
            told[: len(tokens)] = tokens
        if step.run > 1:
            self._links.tell_all(told)
        elif self._choice.may_ask(step):
            self._links.tell_stage(told)
        if is_over:
            self._must_yield = False
        self._computed(step.cut(step.spare))  # meanwhile other shards run the next step
        self._tell_tokens(step, chosen, ends, chosen_s, is_over, guesses if is_over else ())
        return None if is_over else step.following(tokens)

    def _guess(
        self, step: Step, tokens: Sequence[int], ends: Sequence[FinishReason | None]
    ) -> Sequence[Guesses]:
        """For each request of a step, guesses at the tokens behind its newest; empty without, and
        where one ends, as the step of the others is another then."""
        if not step.drafts or self._must_yield or any(ends) or len(tokens) != step.batch:
            return ()
        settled = self._choice.settle(step, tokens)
        answers = [
            (entry.request, *each) for entry, each in zip(step.entries, settled, strict=True)
        ]
        return self._speculator.in_turn(answers, most=step.drafts, at_once=self._at_once)

    @property
    def _at_once(self) -> int:
        """Answers whose steps are computed at the same time: one in each stage. Of those with
        states, every stage hears how a step ended before it begins another."""
        return 1 if self._rewinds else self._links.seat[0] + 1  # the sampler is in the last one

    def _are_faster_in_turn(self, guesses: Sequence[Guesses]) -> bool:
        share = -(-len(guesses) // self._at_once)
        return bool(guesses) and all(each.in_turn >= share for each in guesses)

    def hear_of(self, request: str, program: StageProgram) -> None:
        """Before the request is changed otherwise than by a step: hear how its last one ended."""
        self._drafts.hear_of(request, program)

    def _tell_tokens(
        self,
        step: Step,
        chosen: Sequence[Chosen],
        ends: Sequence[FinishReason | None],
        chosen_s: float,
        is_over: bool,
        guesses: Sequence[Guesses] = (),
    ) -> None:
        logprobs = tuple(each.logprobs for each in chosen)
        self._report(
            step_frames.Tokens(
                tokens=tuple(each.token for each in chosen),
                ends=tuple(ends),
                last=is_over,
                chosen_s=chosen_s,
                logprobs=logprobs if any(logprobs) else (),
                drafted=step.drafted,
                together=self._choice.computes_together(step),
                pairs=step.drafts > 0
                and step.batch == 1
                and self._speculator.is_paired(step.entries[0].request),
                guesses=tuple(guesses),
            )
        )
