"""A model for tests of the server: it says what it is told to, when it is told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from edge.answers.text import Token, TokenLogprob
from edge.api.async_model import AsyncModel
from edge.errors import EdgeError
from edge.server.app import Server
from edge.server.guard import Rules
from edge.server.keys import Key
from edge.server.model_pool import ModelPool
from edge.text.answer_forms import AnswerForm
from edge.text.answer_parser import AnswerParser
from edge.text.answer_parts import AnswerPart, Said
from edge.text.tool_types import tool_types

Json = dict[str, Any]


def word(text: str, *, ends: bool = False) -> Token:
    return Token(token_id=1, text=text, finish_reason="stop" if ends else None, chosen_s=0.0)


def likely(text: str, logprob: float, token_id: int = 1) -> TokenLogprob:
    return TokenLogprob(token_id=token_id, text=text, logprob=logprob, bytes=text.encode())


def with_logprob(text: str, logprob: float, *top: TokenLogprob, token_id: int = 1) -> Token:
    """A token of an answer whose logprobs were asked for."""
    return Token(
        token_id=token_id,
        text=text,
        finish_reason=None,
        chosen_s=0,
        logprob=logprob,
        top_logprobs=top,
        chosen=likely(text, logprob, token_id),
    )


class ScriptedModel:
    """Every question is answered with what `says` brings; prompts are as long as their words."""

    name = "m"
    answer_form = AnswerForm()
    end_ids: frozenset[int] = frozenset()
    reads_pictures = False

    def __init__(self) -> None:
        self.tokenizer = self
        self.says: asyncio.Queue[Token | EdgeError] = asyncio.Queue()
        self.prompts: list[object] = []
        self.salts: list[str] = []
        """Of each of them."""
        self.under_way = 0
        self.is_closed = False
        self.tokens: set[str] = set()
        """That its tokenizer has of its own."""
        self.found_tokens = 0
        """Of each prompt."""
        self.refuses: EdgeError | None = None
        """What it raises when it is asked."""

    async def aclose(self) -> None:
        self.is_closed = True

    def token_id(self, token: str) -> int | None:
        return len(token) if token in self.tokens else None

    def encode(self, prompt: str) -> list[int]:
        return [len(each) for each in prompt.split()]

    def encode_chat(self, messages: Sequence[Json], **_given: object) -> list[int]:
        return self.encode(" ".join(str(each["content"]) for each in messages))

    def has_told_tools(self, ids: Sequence[int], messages: Sequence[Json], **given: object) -> bool:
        return self.encode_chat(messages, **given) != list(ids)

    def begins_thinking(self, _ids: object) -> bool:
        return False

    def stream(
        self,
        prompt: Any,
        *_: object,
        chat_tools: Sequence[Any] | None = None,
        cache_salt: str = "",
        **__: object,
    ) -> ScriptedReply:
        self.prompts.append(prompt)
        self.salts.append(cache_salt)
        if self.refuses is not None:
            raise self.refuses
        if chat_tools is None:
            return ScriptedReply(self)
        thinking = self.begins_thinking(prompt)
        parser = AnswerParser(self.answer_form, thinking=thinking, tools=tool_types(chat_tools))
        return ScriptedReply(self, parser)


class ScriptedReply:
    """Takes what its model says next, as others of it do."""

    def __init__(self, model: ScriptedModel, parser: AnswerParser | None = None) -> None:
        self._model = model
        self._parser = parser
        self._is_over = False

    async def __aenter__(self) -> ScriptedReply:
        self._model.under_way += 1
        return self

    async def __aexit__(self, *_: object) -> None:
        self._model.under_way -= 1

    def __aiter__(self) -> ScriptedReply:
        return self

    async def __anext__(self) -> Token:
        if self._is_over:
            raise StopAsyncIteration
        told = await self._model.says.get()
        if isinstance(told, EdgeError):
            raise told
        self._is_over = told.finish_reason is not None
        parts: list[AnswerPart] = [Said(told.text)] if told.text else []
        if self._parser is not None:
            parts = self._parser.feed(told.text) + (self._parser.finish() if self._is_over else [])
        return replace(told, parts=tuple(parts))

    def reply(self) -> ScriptedReply:
        return self

    @property
    def statistics(self) -> Json:
        return {"found_tokens": self._model.found_tokens}


class Visit:
    """One request to a server without a network between: what was sent so far, and its end."""

    def __init__(
        self, model: ScriptedModel, path: str, body: Json, keys: Sequence[Key] = (), **server: Any
    ) -> None:
        """keys: of the server; the first one is shown. server: further arguments of it."""
        self.pool = ModelPool.of(cast(AsyncModel, model), "m")
        self.server = Server(self.pool, rules=Rules(keys=tuple(keys)), **server)
        self.sent: list[Json] = []
        self.gone = asyncio.Event()
        self._body: bytes | None = json.dumps({"model": "m", **body}).encode()
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(b"x-api-key", each.text.encode()) for each in keys[:1]],
        }
        self.running = asyncio.ensure_future(
            self.server.app(scope, cast(Any, self._receive), cast(Any, self._send))
        )

    async def _receive(self) -> Json:
        if (body := self._body) is not None:
            self._body = None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Json) -> None:
        self.sent.append(message)

    @property
    def status(self) -> int | None:
        return self.sent[0]["status"] if self.sent else None

    @property
    def text(self) -> str:
        """What has come of the body."""
        return b"".join(each.get("body", b"") for each in self.sent).decode()
