"""Streamed answers, in the lines of each dialect, with a keep-alive line in long silences."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from edge.errors import EdgeError
from edge.server.answers import Happening
from edge.server.refusals import Refusal, refusal_of

Json = dict[str, Any]

SILENCE_S = 10.0
"""Seconds of silence after which a keep-alive line is sent. Proxies give up after a minute or so;
a long prompt, a lost device or answers that come first can take longer."""

COMMENT = ": waiting\n\n"
"""A comment of server-sent events, which clients ignore."""


class BegunAnswer:
    """An answer's events, of which the first has arrived."""

    def __init__(self, first: Happening, rest: AsyncGenerator[Happening]) -> None:
        self._first: Happening | None = first
        self._rest = rest

    def __aiter__(self) -> BegunAnswer:
        return self

    async def __anext__(self) -> Happening:
        first, self._first = self._first, None
        return await anext(self._rest) if first is None else first

    async def aclose(self) -> None:
        """End the answer."""
        await self._rest.aclose()


class StreamedAnswer(StreamingResponse):
    """The lines of an answer that has begun. Its generators are closed, the outer one first, when
    it is over or its client has gone."""

    def __init__(
        self,
        lines: AsyncGenerator[str],
        begun: BegunAnswer,
        *,
        media_type: str,
        sign: Callable[[], str],
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """sign: makes a keep-alive line, which may come between any two lines."""
        super().__init__(lines, media_type=media_type, headers=headers)
        self._lines = lines
        self._begun = begun
        self._sign = sign
        self._sent_s = 0.0
        self._is_over = False
        self._one_at_a_time = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()
        self._sent_s = loop.time()

        async def sending(message: Message) -> None:
            self._sent_s = loop.time()
            async with self._one_at_a_time:
                await send(message)
                self._is_over = not message.get("more_body", True)

        living = asyncio.create_task(self._show_life(send))
        try:
            await super().__call__(scope, receive, sending)
        finally:
            living.cancel()
            await asyncio.gather(living, return_exceptions=True)
            await self._lines.aclose()
            await self._begun.aclose()

    async def _show_life(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        while not self._is_over:
            left_s = self._sent_s + SILENCE_S - loop.time()
            if left_s > 0:
                await asyncio.sleep(left_s)
                continue
            self._sent_s = loop.time()
            async with self._one_at_a_time:
                if not self._is_over:
                    body = self._sign().encode()
                    await send({"type": "http.response.body", "body": body, "more_body": True})


def events(lines: AsyncGenerator[str], begun: BegunAnswer, sign: str = COMMENT) -> StreamedAnswer:
    """The answer as server-sent events."""
    return StreamedAnswer(
        lines,
        begun,
        media_type="text/event-stream",
        sign=lambda: sign,
        headers={"cache-control": "no-cache", "x-accel-buffering": "no"},
    )


async def data_lines(chunks: AsyncGenerator[Json]) -> AsyncGenerator[str]:
    """Lines of OpenAI's chunks."""
    async with contextlib.aclosing(chunks):
        try:
            async for chunk in chunks:
                yield f"data: {json.dumps(chunk)}\n\n"
        except EdgeError as error:  # the status was sent already
            yield f"data: {json.dumps(refusal_of(error).body('openai'))}\n\n"
            return
        yield "data: [DONE]\n\n"


async def named_lines(
    events: AsyncGenerator[Json], failed: Callable[[Refusal], Json]
) -> AsyncGenerator[str]:
    """Lines of events whose `type` is their name. failed: makes the last event of an answer that
    fails."""
    async with contextlib.aclosing(events):
        try:
            async for event in events:
                yield named_line(event)
        except EdgeError as error:
            yield named_line(failed(refusal_of(error)))


def named_line(event: Json) -> str:
    return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"


async def json_lines(lines: AsyncGenerator[Json]) -> AsyncGenerator[str]:
    """Lines of Ollama's objects."""
    async with contextlib.aclosing(lines):
        try:
            async for line in lines:
                yield json_line(line)
        except EdgeError as error:
            yield json_line(refusal_of(error).body("ollama"))


def json_line(line: Json) -> str:
    return f"{json.dumps(line)}\n"
