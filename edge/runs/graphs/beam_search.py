"""Which tokens a decoder is given next: greedy and beam search. Pure: logits in, tokens out.

Beam search is that of transformers, `GenerationMixin._beam_search`: finished rows compete by their
sum of log-probabilities over `length ** length_penalty`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.graphs.search_terms import SearchTerms

_NEVER = -1e9
Floats = NDArray[np.float32]


class TokenSearch:
    """Rows of tokens that grow. The first prompt tokens are not chosen."""

    def __init__(self, terms: SearchTerms, prompt: Sequence[int]) -> None:
        self.terms = terms
        self.rows: list[list[int]] = [list(prompt) for _ in range(terms.num_beams)]
        """Rows under way, each as long as the others."""
        self.order: tuple[int, ...] = ()
        """The row that each row continues; empty: its own."""
        self._prompt_tokens = len(prompt)
        self._longest = len(prompt) + terms.max_new_tokens
        self._scores = np.full(terms.num_beams, _NEVER, np.float32)
        self._scores[0] = 0.0
        self._finished: list[tuple[float, list[int], bool]] = [
            (_NEVER, list(prompt), False) for _ in range(terms.num_beams)
        ]
        """Best first: score, tokens, and whether it is an answer at all."""
        self._may_improve = True

    @property
    def score(self) -> float:
        """The score of the answer; greedy search has none, so 0."""
        return self._finished[0][0] if self.terms.num_beams > 1 else 0.0

    @property
    def answer(self) -> list[int]:
        """The tokens that were chosen, with the last one that ends them."""
        best = self.rows[0] if self.terms.num_beams == 1 else self._finished[0][1]
        return best[self._prompt_tokens :]

    def take(self, logits: NDArray[Any]) -> bool:
        """Choose by the logits of the last position, [rows, vocabulary]. False: the search ends."""
        scores = self._allowed(_log_softmax(logits.astype(np.float32)))
        if self.terms.num_beams == 1:
            token = int(scores[0].argmax())
            self.rows[0].append(token)
            return not self._ends(self.rows[0])
        return self._take_beams(scores)

    def _take_beams(self, scores: Floats) -> bool:
        terms, beams = self.terms, self.terms.num_beams
        total = (scores + self._scores[:, None]).reshape(-1)
        count = min(max(2, 1 + len(terms.eos_token_ids)) * beams, len(total))
        chosen = np.argsort(-total, kind="stable")[:count]
        found = [
            (float(total[each]), int(each) // scores.shape[1], int(each) % scores.shape[1])
            for each in chosen
        ]
        rows = [[*self.rows[row], token] for _score, row, token in found]
        ends = [self._ends(row) for row in rows]
        running = [
            score + ended * _NEVER for (score, _row, _token), ended in zip(found, ends, strict=True)
        ]
        following = np.argsort(-np.asarray(running), kind="stable")[:beams]
        made = len(rows[0]) - self._prompt_tokens
        full = all(each[2] for each in self._finished) and terms.early_stopping is True
        for place, (score, row, ended) in enumerate(
            (score, row, ended) for (score, *_), row, ended in zip(found, rows, ends, strict=True)
        ):
            is_answer = ended and place < beams
            value = score / made**terms.length_penalty
            value += _NEVER * (full + (not self._may_improve) + (not is_answer))
            self._finished.append((value, row, is_answer))
        self._finished = sorted(self._finished, key=lambda each: -each[0])[:beams]
        self.rows = [rows[each] for each in following]
        self.order = tuple(found[each][1] for each in following)
        self._scores = np.array([running[each] for each in following], np.float32)
        never = terms.early_stopping == "never" and terms.length_penalty > 0
        best_length = terms.max_new_tokens if never else made
        best = float(self._scores[0]) / best_length**terms.length_penalty
        least = min(each[0] for each in self._finished)
        self._may_improve &= any(
            best > (least if answered else _NEVER) for _score, _row, answered in self._finished
        )
        is_open = not (all(each[2] for each in self._finished) and terms.early_stopping is True)
        return self._may_improve and is_open and not all(ends)

    def _ends(self, row: list[int]) -> bool:
        return row[-1] in self.terms.eos_token_ids or len(row) >= self._longest

    def _allowed(self, scores: Floats) -> Floats:
        """Scores with those of forbidden tokens at minus infinity."""
        terms, length = self.terms, len(self.rows[0])
        made = length - self._prompt_tokens
        forced = None
        if length == 1:
            forced = terms.forced_bos_token_id
        if length == self._longest - 1 and terms.forced_eos_token_id is not None:
            forced = terms.forced_eos_token_id
        if (size := terms.no_repeat_ngram_size) and length + 1 >= size:
            for row, tokens in enumerate(self.rows):
                end = tokens[length - size + 1 :]
                for begin in range(length - size + 1):
                    if tokens[begin : begin + size - 1] == end:
                        scores[row, tokens[begin + size - 1]] = -np.inf
        if made < terms.min_new_tokens:
            scores[:, list(terms.eos_token_ids)] = -np.inf
        if forced is not None:
            scores[:] = -np.inf
            scores[:, forced] = 0.0
        scores[:, list(terms.suppress_tokens)] = -np.inf
        is_forced_first = self._prompt_tokens == 1 and terms.forced_bos_token_id is not None
        if made == (1 if is_forced_first else 0):
            scores[:, list(terms.begin_suppress_tokens)] = -np.inf
        if terms.only_tokens:
            only = list(terms.only_tokens)
            kept = scores[:, only]
            scores[:] = -np.inf
            scores[:, only] = kept
        return scores


def _log_softmax(logits: Floats) -> Floats:
    apart = logits - logits.max(axis=-1, keepdims=True)
    found: Floats = apart - np.log(np.exp(apart).sum(axis=-1, keepdims=True))
    return found
