"""The run loop: the steps of one shard, each made from the tokens of the one before.

Used by the compute thread, except `yield_run`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from edge.backends.interface import StageCompute, StageProgram, StepLogits
from edge.engine.distributed_sampling import DistributedSampling
from edge.engine.shard_links import ShardLinks
from edge.engine.speculation import Speculator
from edge.engine.timing import ShardCounters
from edge.protocol import messages
from edge.protocol.frame_codec import Event
from edge.protocol.step import Step

END_OF_RUN = -1
"""Sent instead of a token when a run, or a single step, ends."""

ASK_FOR_LOGITS = -2
"""Sent to the last stage instead of a token: send all logits of this step, then listen again."""


class RunLoop:
    """Runs the steps of one shard and reports the sampled tokens."""

    def __init__(
        self,
        links: ShardLinks,
        choice: DistributedSampling,
        speculator: Speculator,
        times: ShardCounters,
        report: Callable[[Event], None],
        computed: Callable[[Step], None],
        *,
        is_last_stage: bool,
    ) -> None:
        """computed: called after each step and before its tokens are reported, so that what it
        sends arrives first."""
        self._links = links
        self._choice = choice
        self._speculator = speculator
        self._times = times
        self._report = report
        self._computed = computed
        self._is_last_stage = is_last_stage
        self._must_yield = False
        self._sampled_s = 0.0
        """When the last step of the run was over; 0 in its first step."""

    def yield_run(self) -> None:
        """End the run after its current token: others are waiting. For any thread."""
        self._must_yield = True

    def run(self, step: Step, program: StageProgram) -> Iterator[Step]:
        """Run the step, and for a run the steps that follow. Yields each once it is computed,
        without tokens that were cut off again."""
        if step.singly:
            yield from self._compute_apart(step, program)
            return
        self._sampled_s = 0.0
        following: Step | None = step
        while following is not None:
            step = following
            self._times.begin(is_decode=step.is_decode)
            logits = self.compute(step, program)
            start_s = time.perf_counter()
            if logits is not None and self._links.is_sampler:
                following, done = self._sample_and_tell(step, logits)
            elif logits is not None:
                self._choice.offer(step, logits)
            self._times.now.sample_s += time.perf_counter() - start_s
            if not self._links.is_sampler:
                if not step.drafted:  # else it is not known yet which tokens stay
                    self._computed(step.cut(step.spare))
                following, done = self._hear(step, logits)
                if step.drafted:
                    self._computed(done)
            if following is None and done is not step:
                program.cut(step.entries[0].request, done.entries[0].end)
            yield done

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
            self._report(messages.Tokens(tokens=(), ends=(), last=True, chosen_s=time.monotonic()))

    def compute(self, step: Step, program: StageCompute) -> StepLogits | None:
        """Receive from the previous stage, compute, send to the next. The last stage returns
        logits."""
        hidden: NDArray[np.float32] | None = None
        times, collective = self._times.now, self._links.collective
        start_s = time.perf_counter()
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
        times.compute_s += compute_s
        if step.batch == 1 and step.num_tokens == 1:
            position = step.entries[0].position
            self._times.pace.note(compute_s, position=position, now_s=computed_s)
        times.send_s += time.perf_counter() - computed_s
        return logits

    def _is_followed(self, step: Step) -> bool:
        """Whether a drafter is told the step's hidden states."""
        is_told = self._speculator.follower is not None and self._links.is_sampler
        return is_told and not step.states and self._choice.way(step) == "mtp"

    def _with_states(self, step: Step) -> Step:
        """The step, or one for the states of all of its rows, which gives the same logits."""
        has_all = step.num_tokens == step.logit_rows
        return step if has_all or not self._is_followed(step) else step.of_states()

    def _follow(self, step: Step, own: StepLogits, count: int) -> None:
        """Tell a drafter the hidden states of tokens that stay. count: tokens that it gave."""
        follower = self._speculator.follower
        if follower is not None and self._is_followed(step):
            cut = step.logit_rows - count if step.drafted else step.spare
            entry, rows = step.entries[0], step.num_tokens - cut
            states = own.states()[0, :rows]
            follower.follow(entry.request, entry.position, entry.tokens[:rows], states)

    def _hear(self, step: Step, own: StepLogits | None) -> tuple[Step | None, Step]:
        """The next step of a run, as told by the sampler, and this one without tokens that are cut
        off. None at the end of the run.

        The sampler may first ask a shard of its stage for `own`, its logits.
        """
        may_ask = self._is_last_stage and self._choice.may_ask(step)
        if not (step.run > 1 or step.drafted or may_ask):
            return None, step.cut(step.spare)
        told = _message(step)
        start_s = time.perf_counter()
        self._links.hear(told)
        if own is not None and may_ask and told[0] == ASK_FOR_LOGITS:
            self._choice.send_logits(own)
            self._links.hear(told)
        self._times.now.receive_s += time.perf_counter() - start_s
        is_over = told[0] == END_OF_RUN
        if not step.drafts:
            return None if is_over else step.following(told.tolist()), step
        count = int(told[1])
        done = step.cut(step.logit_rows - count)
        if is_over:
            return None, done
        return step.drafting(count, told[3 : 3 + told[2]].tolist()), done

    def _sample_and_tell(self, step: Step, own: StepLogits) -> tuple[Step | None, Step]:
        """Sample tokens and send them to the other shards, then to the coordinator. Returns the
        next step, and this one without tokens that are cut off."""
        if step.states:
            states = self._choice.gather_states(step, own)
            self._computed(step)
            self._report(messages.States(rows=states.tobytes()))
            return None, step
        if self._choice.wants_logits(step):  # of the step's only request
            rows = self._choice.gather_logits(own)[:, : step.logit_rows]
            self._computed(step)
            self._report(messages.Logits(rows=rows.tobytes()))
            return None, step

        def ask_all() -> None:
            self._links.tell_stage(np.full_like(_message(step), ASK_FOR_LOGITS))

        chosen = self._choice.choose(step, own, ask_all)
        chosen_s = time.monotonic()
        ends = self._choice.take(step, [each.token for each in chosen])
        del chosen[len(ends) :]
        tokens = [each.token for each in chosen]
        self._follow(step, own, len(tokens))
        last = self._must_yield or any(ends) or self._choice.is_cancelled(step)
        if step.drafts:
            following, done = self._draft(step, tokens, is_over=last, now_s=chosen_s)
        else:
            following = None if last or step.run == 1 else step.following(tokens)
            done = step.cut(step.spare)
        told = _message(step)
        if following is None:
            told[0] = END_OF_RUN
        if step.drafts:
            told[1] = len(tokens)
            if following is not None:
                next_tokens = following.entries[0].tokens
                told[2] = len(next_tokens)
                told[3 : 3 + len(next_tokens)] = next_tokens
        elif following is not None:
            told[...] = tokens
        if step.run > 1 or step.drafted:
            self._links.tell_all(told)
        elif self._choice.may_ask(step):
            self._links.tell_stage(told)
        if following is None:
            self._must_yield = False
        self._computed(done)  # meanwhile other shards run the next step
        logprobs = tuple(each.logprobs for each in chosen)
        self._report(
            messages.Tokens(
                tokens=tuple(tokens),
                ends=tuple(ends),
                last=following is None,
                chosen_s=chosen_s,
                logprobs=logprobs if any(logprobs) else (),
                drafted=step.drafted,
            )
        )
        return following, done

    def _draft(
        self, step: Step, tokens: Sequence[int], *, is_over: bool, now_s: float
    ) -> tuple[Step | None, Step]:
        """The next step of a run with drafts, and this one without the guesses that were wrong."""
        (entry,), count = step.entries, len(tokens)
        if step.is_decode and self._sampled_s:
            self._speculator.seconds.note(step.num_tokens, now_s - self._sampled_s)
        self._sampled_s = now_s
        done = step.cut(step.logit_rows - count)
        if step.drafted:
            self._speculator.verified(entry.request, step.drafted, count - 1)
        left = step.run - count
        if is_over or not left:
            return None, done
        known, terms = self._choice.settle(step, tokens)
        draft = self._speculator.draft(
            entry.request,
            known,
            prompt_tokens=terms.prompt_tokens,
            speculate=terms.speculate,
            most=min(step.drafts, max(1, left - 1)),
        )
        return step.drafting(count, (tokens[-1], *draft)), done


def _message(step: Step) -> NDArray[np.int64]:
    """A message of the sampler about a step: a token of each entry; or, in a run with drafts, what
    ends it, how many tokens the step gave, and the number and ids of the next step's tokens."""
    return np.zeros(4 + step.drafts if step.drafts else step.batch, np.int64)
