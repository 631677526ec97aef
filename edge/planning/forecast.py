"""Predicted times of a loaded model's replies, and the actual times since the last report."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from edge.partition import Estimate
from edge.planning.drift import FinishedAnswer
from edge.planning.proposal import Proposal
from edge.protocol.step_times import PeerTimes

MOST_ANSWERS = 64
"""The latest replies that are kept for comparison, because they may never be read."""


@dataclass(slots=True, eq=False)
class BegunReply:
    """A reply under way. `at_once`: the largest number of replies under way at the same time."""

    at_once: int = 0


class Forecast:
    """Predictions by the proposal that a model was loaded with. Safe for any thread.

    Only replies that ran alone are compared with a prediction, because others share each step.
    """

    def __init__(self, proposal: Proposal) -> None:
        self.proposal = proposal
        # Re-entrant: a finaliser may `end` a reply in the middle of another call of its thread.
        self._mutex = threading.RLock()
        self._under_way: list[BegunReply] = []
        self._answers: deque[FinishedAnswer] = deque(maxlen=MOST_ANSWERS)
        self._all_alone = True
        self._expert_hits: float | None = None
        """Hit rate of the expert cache that peers counted last under this plan."""

    def replace(self, proposal: Proposal) -> None:
        """Note that the model runs with another plan. Replies under way are compared with
        neither."""
        with self._mutex:
            self.proposal = proposal
            self._expert_hits = None
            self._answers.clear()
            self._all_alone = self._all_alone and not self._under_way

    def begin(self) -> BegunReply:
        reply = BegunReply()
        with self._mutex:
            self._under_way.append(reply)
            for each in tuple(self._under_way):
                each.at_once = max(each.at_once, len(self._under_way))
        return reply

    def end(self, reply: BegunReply) -> None:
        """Note that the reply was finished or cancelled. May be called again."""
        with self._mutex:
            if reply in self._under_way:
                self._under_way.remove(reply)
                self._all_alone = self._all_alone and reply.at_once == 1

    def learn(self, times: Sequence[PeerTimes]) -> None:
        """Note the hit rate of the expert cache that peers counted over replies; a plan cannot
        predict it."""
        wanted = sum(each.decode.experts for each in times)
        if wanted:
            read = sum(each.decode.experts_read for each in times)
            with self._mutex:
                self._expert_hits = 1 - read / wanted

    def of(self, *, prompt_tokens: int, new_tokens: int, concurrency: int = 1) -> Estimate | None:
        """The prediction for a reply of these lengths; None where devices were not measured."""
        return self.proposal.predict(
            prompt_tokens=prompt_tokens,
            output_tokens=new_tokens,
            concurrency=concurrency,
            expert_hits=self._expert_hits,
        )

    def note(
        self, *, prompt_tokens: int, new_tokens: int, first_token_s: float, decode_s: float
    ) -> None:
        """Keep a finished reply for the next `take`."""
        predicted = self.of(prompt_tokens=prompt_tokens, new_tokens=new_tokens)
        if predicted is None:
            return
        answer = FinishedAnswer(
            new_tokens=new_tokens,
            first_token_s=first_token_s,
            decode_s=decode_s,
            predicted=predicted,
        )
        with self._mutex:
            self._answers.append(answer)

    def take(self) -> list[FinishedAnswer]:
        """The replies noted since the last call; none if other replies ran at the same time."""
        with self._mutex:
            answers = list(self._answers)
            self._answers.clear()
            all_alone, self._all_alone = self._all_alone, not self._under_way
        return answers if all_alone else []
