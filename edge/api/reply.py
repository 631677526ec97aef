"""A reply on its way to the caller: an iterator over tokens, and the whole at its end."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge.concurrency.loop_thread import LoopThread
from edge.coordinator.generation import Generation, GenerationRequest, Token
from edge.coordinator.loaded_model import LoadedModel
from edge.coordinator.requests import Request
from edge.errors import EdgeError, RequestError
from edge.planning.forecast import Forecast
from edge.protocol.step import FinishReason
from edge.text import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A finished answer.

    `finish_reason` is "stop" (an end token or a stop string) or "length" (max_new_tokens, or the
    context is full). `token_ids` hold every generated token, the end token included; `text` has
    neither special tokens nor the stop string. `statistics` are numbers by name: `tokens_per_s`
    (after the first), `first_token_s`, `total_s`, `prompt_tokens`, `new_tokens`, `seed`; and, where
    the devices were measured, `predicted_tokens_per_s` and `predicted_first_token_s` of such a
    reply alone.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    statistics: Mapping[str, float]


class ReplyStream:
    """An iterator of Tokens; `reply()` is the whole once it has ended. Closing it cancels.

    For one thread at a time. Raises PeerLostError if a device goes away, RequestError if the model
    or the cluster is closed meanwhile.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        loop: LoopThread,
        request: GenerationRequest,
        tokenizer: Tokenizer | None,
        forecast: Forecast,
    ) -> None:
        self._loaded = loaded
        self._loop = loop
        self._forecast = forecast
        self._under_way = forecast.begin()
        self._ended = False
        self._events: queue.SimpleQueue[Token | EdgeError] = queue.SimpleQueue()
        self._sink = _TokenSink(Generation(request, tokenizer), self._events)
        self._request = Request(prompt=request.prompt_ids, terms=request.terms, sink=self._sink)
        loop.run(_submit(loaded, self._request))

    def __iter__(self) -> Iterator[Token]:
        return self

    def __next__(self) -> Token:
        if self._ended:
            raise StopIteration
        try:
            event = self._events.get()
        except BaseException:
            self.close()
            raise
        if isinstance(event, EdgeError):
            self._end()
            raise event
        if event.finish_reason is not None:
            self._end()
            self._forecast.note(self._sink.generation.statistics())
        return event

    def reply(self) -> Reply:
        """The whole reply. Raises RequestError before its end."""
        generation = self._sink.generation
        if generation.finish_reason is None:
            raise RequestError("the reply is not finished; iterate to its end first")
        statistics = generation.statistics()
        return Reply(
            text=generation.text,
            token_ids=tuple(generation.token_ids),
            finish_reason=generation.finish_reason,
            statistics=statistics | self._forecast.figures(statistics),
        )

    def close(self) -> None:
        """Cancel what is left of the reply and free its memory on the peers."""
        if not self._ended:
            self._end()
            self._loop.post(_cancel(self._loaded, self._request))

    def _end(self) -> None:
        self._ended = True
        self._forecast.end(self._under_way)

    def __enter__(self) -> ReplyStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # Leaving a loop over the stream drops it: nobody is left who could take a token.
        if hasattr(self, "_request"):
            self.close()


def evaluate(
    loaded: LoadedModel, loop: LoopThread, token_ids: tuple[int, ...]
) -> NDArray[np.float32]:
    """The logits [tokens, vocab] after each of the tokens."""
    sink = _LogitsSink()
    request = Request(prompt=token_ids, terms=None, sink=sink)
    try:
        loop.run(_submit(loaded, request))
        return sink.result()
    except BaseException:
        loop.post(_cancel(loaded, request))
        raise


async def _submit(loaded: LoadedModel, request: Request) -> None:
    loaded.submit(request)


async def _cancel(loaded: LoadedModel, request: Request) -> None:
    loaded.cancel(request.id)


class _TokenSink:
    """Turns sampled tokens into Tokens on the loop's thread, and queues them for the caller."""

    def __init__(
        self, generation: Generation, events: queue.SimpleQueue[Token | EdgeError]
    ) -> None:
        self.generation = generation
        self._events = events

    def token(self, token_id: int, end: FinishReason | None) -> bool:
        token = self.generation.push(token_id, end)
        self._events.put(token)
        return token.finish_reason is not None

    def logits(self, rows: NDArray[np.float32]) -> None:
        raise AssertionError("a generation asks for tokens, not logits")

    def failed(self, error: EdgeError) -> None:
        self._events.put(error)


class _LogitsSink:
    def __init__(self) -> None:
        self._events: queue.SimpleQueue[NDArray[np.float32] | EdgeError] = queue.SimpleQueue()

    def token(self, token_id: int, end: FinishReason | None) -> bool:
        raise AssertionError("an evaluation asks for logits, not tokens")

    def logits(self, rows: NDArray[np.float32]) -> None:
        self._events.put(rows)

    def failed(self, error: EdgeError) -> None:
        self._events.put(error)

    def result(self) -> NDArray[np.float32]:
        event = self._events.get()
        if isinstance(event, EdgeError):
            raise event
        return event
