"""Replies: streams of tokens, and the whole reply at the end."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edge.answers.answer import Answer, new_answer_id
from edge.answers.journal import Journal
from edge.answers.terms import Terms
from edge.answers.text import (
    FEWEST_TOKENS_OF_A_RATE,
    AnswerText,
    Statistics,
    Token,
    TokenLogprob,
)
from edge.concurrency.blocking import run_blocking
from edge.concurrency.loop_thread import SIGNALS_SEEN_WITHIN_S, LoopThread
from edge.errors import EdgeError, RequestError
from edge.kernels.sampling.logprobs import Logprobs
from edge.planning.forecast import Forecast
from edge.protocol.step import FinishReason
from edge.runs.copied_model import CopiedModel
from edge.runs.model import Recovery, RunningModel
from edge.runs.pictures import Pictures
from edge.text import Tokenizer
from edge.text.answer_parts import ToolCall
from edge.text.grammar import Matcher

_SHOWN_CHARACTERS = 60
"""Most characters of a text in the one-line form of a reply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A finished answer.

    `finish_reason` is "stop" (an end token or a stop string) or "length" (max_new_tokens, or the
    context is full). `token_ids` hold every generated token, the end token included; `text` has
    neither special tokens nor the stop string. `statistics` are numbers by name: `prompt_tokens`,
    `new_tokens`, `first_token_s`, `decode_s` (from the first sampled token to the last),
    `tokens_per_s` (after the first; None under eight tokens), `total_s`, `seed`, `found_tokens` (of
    the prompt, found in a prefix cache). If the devices were measured, `predicted_first_token_s`
    and `predicted_tokens_per_s` are those of such a reply alone, and `predicted_tokens_per_s_range`
    is the rate in slow and in fast minutes. If tokens were guessed, `drafted_tokens` counts the
    guesses, `accepted_tokens` those that were right, and `tokens_per_pass` is the mean number of
    tokens that a pass over the weights gave. If the prompt has images, `tiles_read` counts the
    pieces of them that were read now and not for an earlier prompt, `pictures_s` are the seconds
    until all were read, the loading of the vision encoder included, and `predicted_pictures_s`
    (None: not measured) those of reading alone, a part of `predicted_first_token_s`. In a resumed
    reply, times are of the tokens after the first `resumed_tokens`.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    statistics: Statistics
    logprobs: tuple[TokenLogprob, ...] = ()
    """The logprob of each of `token_ids`, if `logprobs` asked for it; see `Token.logprob`."""
    top_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    """The most likely tokens at each position."""
    content: str = ""
    """In a chat, `text` without thinking and tool calls; else all of `text`."""
    reasoning: str = ""
    """The thinking before the answer, in a chat."""
    tool_calls: tuple[ToolCall, ...] = ()
    """The tool calls in a chat, not checked against the tools' schemas."""
    recoveries: tuple[Recovery, ...] = ()
    """Failovers during the reply, after peers were lost, joined or became busy. The tokens are the
    same."""

    def __repr__(self) -> str:
        count = len(self.token_ids)
        return f"<Reply of {count} tokens ({self.finish_reason}): {_beginning(self.text)}>"

    @property
    def message(self) -> dict[str, object]:
        """The reply as a message of the conversation, for the next turn."""
        message: dict[str, object] = {"role": "assistant", "content": self.content}
        if self.tool_calls:
            message["tool_calls"] = [
                {"type": "function", "function": asdict(call)} for call in self.tool_calls
            ]
        return message

    @property
    def tokens_per_s(self) -> float:
        """The rate after the first token. Raises RequestError for fewer than eight tokens."""
        rate = self.statistics["tokens_per_s"]
        if rate is None:
            raise RequestError(
                f"a reply of {len(self.token_ids)} tokens is too short for a rate",
                remedy=f"ask for at least {FEWEST_TOKENS_OF_A_RATE}",
            )
        return rate


def _beginning(text: str) -> str:
    return repr(text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyMaker:
    """The parts of one model that its replies are made with."""

    running: RunningModel | CopiedModel
    tokenizer: Tokenizer | None
    forecast: Forecast
    pictures: Pictures | None = None
    """Reads pictures; None: the model reads none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedReply:
    """A checked request for one reply."""

    terms: Terms
    match: Callable[[], Matcher] | None
    """Compiles the answer's grammar, which takes time."""
    keep: Callable[[], Journal | None]
    """Begins the journal, or returns the one that is resumed. None: there is none."""
    id: str | None = None


class Mailbox(Protocol):
    """The queue from the event loop to a reader; each kind of reader waits in its own way."""

    def put_nowait(self, item: Token | EdgeError, /) -> None: ...


class ReplyFeed:
    """One reply between the event loop, which makes it, and its reader.

    `start`, `cancel` and the methods of a Sink are for the loop's thread, the rest for the
    reader's.
    """

    def __init__(self, model: ReplyMaker, asked: AskedReply, mailbox: Mailbox) -> None:
        self.ended = False
        self._model = model.running
        self._text = AnswerText(asked.terms, model.tokenizer)
        self._answer = Answer(terms=asked.terms, sink=self, id=asked.id or new_answer_id())
        self._match = asked.match
        self._pictures = model.pictures
        self._starting: asyncio.Task[None] | None = None
        self._mailbox = mailbox
        self._forecast = model.forecast
        self._forecast_entry = model.forecast.begin()
        self._recovered = slice(len(model.running.recoveries), None)
        self._journal = asked.keep()

    def __str__(self) -> str:
        made = self._text
        state = made.finish_reason or ("ended" if self.ended else "under way")
        return f"of {len(made.token_ids)} tokens ({state}): {_beginning(made.text)}"

    @property
    def kept_as(self) -> str | None:
        """The id of the reply's journal; None: it has none."""
        return None if self._journal is None else self._journal.id

    def start(self) -> None:
        if self._journal is not None and self._restored(self._journal):
            return
        if self._match is None and not self._answer.terms.tiles:
            self._model.submit(self._answer)
        else:
            self._starting = asyncio.ensure_future(self._start_prepared())

    def _restored(self, journal: Journal) -> bool:
        """Take the tokens of the journal. Returns whether the answer is complete with them."""
        self._answer.singly = journal.content.singly
        self._answer.together = journal.content.together
        self._answer.pairs = self._answer.ends_together
        for each in journal.content.tokens:
            token = self._text.restore(each.token_id, each.end, each.logprobs)
            self._answer.tokens.append(each.token_id)
            self._mailbox.put_nowait(token)
            if token.finish_reason is not None:
                return True
        return False

    async def _start_prepared(self) -> None:
        """Submit the answer once its grammar is compiled and its pictures are read."""
        answer, match = self._answer, self._match

        def matcher() -> Matcher:
            assert match is not None
            made = match()
            for token in answer.tokens:
                made.take(token)
            return made

        what = "pictures"
        try:
            if answer.terms.tiles:
                if self._pictures is None:
                    raise RequestError(
                        "this model reads no pictures",
                        remedy="leave them out, or load one that does",
                    )
                answer.pictures = await self._pictures.read_for(answer.terms)
            if match is not None:
                what = "grammar"
                answer.matcher = await run_blocking(matcher)
        except EdgeError as error:
            self.failed(error)
        except Exception as error:  # a bug of Edge: the reader must not wait for ever
            self.failed(EdgeError(f"the {what} of the answer failed ({error!r})"))
        else:
            self._model.submit(answer)

    def cancel(self) -> None:
        """Forget the rest and free its memory on the peers. Does nothing after its end."""
        if self._starting is not None:
            self._starting.cancel()
        self._model.cancel(self._answer.id)

    def token(
        self,
        token_id: int,
        end: FinishReason | None,
        chosen_s: float,
        logprobs: Logprobs | None,
    ) -> bool:
        token = self._text.push(token_id, end, chosen_s, logprobs)
        if self._journal is not None:
            if len(self._text.token_ids) == 1:
                self._journal.begun(self._answer.singly)
            self._journal.token(
                token_id, token.finish_reason, logprobs, together=self._answer.ends_together
            )
        self._mailbox.put_nowait(token)
        return token.finish_reason is not None

    def rows(self, rows: NDArray[np.float32]) -> None:
        raise AssertionError("a generation asks for tokens, not rows")

    def failed(self, error: EdgeError) -> None:
        self._mailbox.put_nowait(error)

    def take(self, event: Token | EdgeError) -> Token:
        """The token of an item from the mailbox. Raises the item if it is an error."""
        if isinstance(event, EdgeError):
            if isinstance(event, RequestError) and not self._text.token_ids:
                self._drop_journal()  # a later try would fail, too
            self.end()
            raise event
        if event.finish_reason is not None:
            self._drop_journal()
            self.end()
            self._recovered = slice(self._recovered.start, len(self._model.recoveries))
            figures = self._text.statistics()
            # In pairs a reply may be slower than a step a token, without a device that is.
            in_pairs = self._answer.terms.speculate not in {"off", "auto"}
            if not ("resumed_tokens" in figures or in_pairs or self._answer.terms.tiles):
                self._forecast.note(
                    prompt_tokens=figures["prompt_tokens"],
                    new_tokens=figures["new_tokens"],
                    first_token_s=figures["first_token_s"],
                    decode_s=figures["decode_s"],
                )
        return event

    def _drop_journal(self) -> None:
        if self._journal is not None:
            self._journal.remove()
            self._journal = None

    def end(self) -> None:
        """The reader takes no more tokens."""
        self.ended = True
        if self._journal is not None:
            self._journal.close()
        self._forecast.end(self._forecast_entry)

    def reply(self) -> Reply:
        """The whole reply. Raises RequestError before its end."""
        made = self._text
        if made.finish_reason is None:
            raise RequestError("the reply is not finished; iterate to its end first")
        statistics = made.statistics()
        statistics["found_tokens"] = self._answer.found_tokens
        passes = self._answer.passes
        if passes.drafted:
            statistics["drafted_tokens"] = passes.drafted
            statistics["accepted_tokens"] = passes.accepted
            statistics["tokens_per_pass"] = passes.tokens / passes.passes
        pictures = self._answer.pictures
        if pictures is not None:
            statistics["tiles_read"] = pictures.tiles_read
            statistics["pictures_s"] = pictures.seconds
            statistics["predicted_pictures_s"] = pictures.predicted_s
        predicted = self._forecast.of(
            prompt_tokens=statistics["prompt_tokens"], new_tokens=statistics["new_tokens"]
        )
        if predicted is not None and "resumed_tokens" not in statistics:
            reading_s = 0.0 if pictures is None else pictures.predicted_s
            if reading_s is not None:
                statistics["predicted_first_token_s"] = reading_s + predicted.first_token_s
            statistics["predicted_tokens_per_s"] = predicted.tokens_per_s
            statistics["predicted_tokens_per_s_range"] = predicted.tokens_per_s_range
        answer = made.answer
        return Reply(
            text=made.text,
            content=answer.content,
            reasoning=answer.reasoning,
            tool_calls=answer.tool_calls,
            token_ids=tuple(made.token_ids),
            finish_reason=made.finish_reason,
            statistics=statistics,
            logprobs=tuple(made.logprobs),
            top_logprobs=tuple(made.top_logprobs),
            recoveries=tuple(self._model.recoveries[self._recovered]),
        )


BeginReply = Callable[[Mailbox], ReplyFeed]
"""Begins a reply whose reader has this mailbox; it is not started yet."""


class AsyncReplyStream:
    """An asynchronous iterator of Tokens on the loop that the cluster was opened on.

    `reply()` is the whole once it has ended. Leaving the loop over it early, cancelling the task
    that reads it, or `aclose` cancel the rest. For one task at a time. After the loss of a device
    the stream pauses and continues with the same tokens. Raises PeerLostError if failover is
    impossible, RequestError if the model is closed meanwhile.
    """

    def __init__(self, begin: BeginReply) -> None:
        self._events: asyncio.Queue[Token | EdgeError] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._reader: asyncio.Task[object] | None = None
        self._under_way = begin(self._events)
        self._under_way.start()

    def __repr__(self) -> str:
        return f"<AsyncReplyStream {self._under_way}>"

    def __aiter__(self) -> AsyncIterator[Token]:
        return self

    async def __anext__(self) -> Token:
        if self._reader is not None:
            raise RequestError(
                "another task reads this stream already; give each task a stream of its own"
            )
        if self._under_way.ended:
            raise StopAsyncIteration
        self._reader = asyncio.current_task()
        try:
            event = await self._events.get()
        except BaseException:
            self._close()
            raise
        finally:
            self._reader = None
        return self._under_way.take(event)

    @property
    def kept_as(self) -> str | None:
        """The id by which `resume` goes on with it, where `journal` asked for that."""
        return self._under_way.kept_as

    def reply(self) -> Reply:
        """The whole reply. Raises RequestError before its end."""
        return self._under_way.reply()

    async def aclose(self) -> None:
        """Cancel what is left of the reply and free its memory on the peers."""
        self._close()

    def _close(self) -> None:
        if not self._under_way.ended:
            self._under_way.end()
            self._under_way.cancel()

    async def __aenter__(self) -> AsyncReplyStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        # The stream was dropped by leaving the loop over it. The garbage collector may run in
        # another thread.
        under_way = getattr(self, "_under_way", None)
        if under_way is not None and not under_way.ended:
            under_way.end()
            with contextlib.suppress(RuntimeError):  # the loop is closed, and so is the model
                self._loop.call_soon_threadsafe(under_way.cancel)


class ReplyStream:
    """An iterator of Tokens; `reply()` is the whole once it has ended. Closing it cancels.

    For one thread at a time. After the loss of a device the stream pauses and continues with the
    same tokens. Raises PeerLostError if failover is impossible, RequestError if the model or the
    cluster is closed meanwhile.
    """

    def __init__(self, begin: BeginReply, loop: LoopThread) -> None:
        self._events: queue.SimpleQueue[Token | EdgeError] = queue.SimpleQueue()
        self._loop = loop
        self._reading = threading.Lock()
        self._under_way = begin(self._events)
        try:
            loop.start(self._under_way.start)
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"<ReplyStream {self._under_way}>"

    def __iter__(self) -> Iterator[Token]:
        return self

    def __next__(self) -> Token:
        if not self._reading.acquire(blocking=False):
            raise RequestError(
                "another thread reads this stream already; give each thread a stream of its own"
            )
        try:
            if self._under_way.ended:
                raise StopIteration
            self._loop.check_caller()
            try:
                event = self._next_event()
            except BaseException:
                self.close()
                raise
            return self._under_way.take(event)
        finally:
            self._reading.release()

    def _next_event(self) -> Token | EdgeError:
        while True:
            with contextlib.suppress(queue.Empty):
                return self._events.get(timeout=SIGNALS_SEEN_WITHIN_S)

    @property
    def kept_as(self) -> str | None:
        """The id by which `resume` goes on with it, where `journal` asked for that."""
        return self._under_way.kept_as

    def reply(self) -> Reply:
        """The whole reply. Raises RequestError before its end."""
        return self._under_way.reply()

    def close(self) -> None:
        """Cancel what is left of the reply and free its memory on the peers."""
        if not self._under_way.ended:
            self._under_way.end()
            self._loop.submit(self._under_way.cancel)

    def __enter__(self) -> ReplyStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # The stream was dropped by leaving the loop over it.
        if hasattr(self, "_under_way"):
            self.close()


async def evaluate(model: RunningModel | CopiedModel, terms: Terms) -> NDArray[np.float32]:
    """The rows that the terms ask for: logits [tokens, vocab], or hidden states [rows, hidden]."""
    sink = _RowsSink()
    answer = Answer(terms=terms, sink=sink)
    model.submit(answer)
    try:
        return await sink.result
    except BaseException:
        model.cancel(answer.id)
        raise


class _RowsSink:
    def __init__(self) -> None:
        self.result: asyncio.Future[NDArray[np.float32]]
        self.result = asyncio.get_running_loop().create_future()

    def token(
        self,
        token_id: int,
        end: FinishReason | None,
        chosen_s: float,
        logprobs: Logprobs | None,
    ) -> bool:
        raise AssertionError("an evaluation asks for rows, not tokens")

    def rows(self, rows: NDArray[np.float32]) -> None:
        if not self.result.done():  # else cancelled meanwhile
            self.result.set_result(rows)

    def failed(self, error: EdgeError) -> None:
        if not self.result.done():
            self.result.set_exception(error)
