"""OpenAI's /v1/chat/completions and /v1/completions: answers as one object, or as chunks."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from edge.answers.text import Token, TokenLogprob
from edge.server.answers import AnswerPiece, Begin, End, Happening
from edge.server.text_tools import text_given
from edge.server.tools import arguments_text, new_id
from edge.text.answer_parts import ToolCall

Json = dict[str, Any]


@dataclass(slots=True)
class _Answer:
    thought: str = ""
    said: str = ""
    why: str | None = None
    calls: list[Json] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class ChatTranslator:
    """Writes one reply of OpenAI's API: of a chat, or without `chat` of a plain completion."""

    model: str
    chat: bool
    with_logprobs: bool
    with_usage: bool = False
    """Whether a last chunk has the numbers of tokens."""
    text_takers: frozenset[str] = frozenset()
    """Names of custom tools, whose argument is a text."""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))
    _prompt_tokens: int = 0
    _found_tokens: int | None = None
    """Cached tokens of the prompts of all answers."""
    _new_tokens: int = 0
    _thought_tokens: int = 0
    _said: dict[int, int] = field(default_factory=dict)
    """Characters of each answer whose logprobs were sent."""
    _pending: dict[int, Sequence[Token]] = field(default_factory=dict)
    """Tokens of each answer that came without text; they are sent with the next piece."""
    _begun: set[int] = field(default_factory=set)
    _calls: dict[int, int] = field(default_factory=dict)
    """Number of calls in each answer so far."""

    async def whole(self, happenings: AsyncIterator[Happening]) -> Json:
        """The whole reply."""
        answers: dict[int, _Answer] = {}
        async for event in happenings:
            if isinstance(event, Begin):
                self._prompt_tokens = event.prompt_tokens
                continue
            answer = answers.setdefault(event.answer, _Answer())
            if isinstance(event, End):
                answer.why = _why(event)
                self._count(event)
            else:
                answer.thought += event.thought
                answer.said += event.said
                answer.calls += [self._call(call)[0] for call in event.calls]
                answer.tokens += event.tokens
        choices = [self._choice(number, answers[number]) for number in sorted(answers)]
        return {**self._frame(chunk=False), "choices": choices, "usage": self._usage()}

    async def chunks(self, happenings: AsyncIterator[Happening]) -> AsyncGenerator[Json]:
        """The chunks of the reply, as the events come."""
        async for event in happenings:
            if isinstance(event, Begin):
                self._prompt_tokens = event.prompt_tokens
            elif isinstance(event, AnswerPiece):
                tokens: Sequence[Token] = (*self._pending.pop(event.answer, ()), *event.tokens)
                if event.thought or event.said:
                    yield self._chunk(event.answer, self._delta(event), None, tokens)
                    tokens = ()
                elif not event.calls:
                    self._pending[event.answer] = tokens
                for call in event.calls:
                    for delta in self._call_deltas(event.answer, call):
                        yield self._chunk(event.answer, delta, None, tokens)
                        tokens = ()
            else:
                self._count(event)
                empty: Json = {} if self.chat else {"text": ""}
                if self.chat and event.answer not in self._begun:
                    empty = {"role": "assistant", "content": ""}
                tokens = self._pending.pop(event.answer, ())
                yield self._chunk(event.answer, empty, _why(event), tokens)
        if self.with_usage:
            yield {**self._frame(chunk=True), "choices": [], "usage": self._usage()}

    def _frame(self, *, chunk: bool) -> Json:
        prefix, kind = "cmpl-", "text_completion"
        if self.chat:
            prefix, kind = "chatcmpl-", "chat.completion"
        return {
            "id": prefix + self.id,
            "object": f"{kind}.chunk" if chunk and self.chat else kind,
            "created": self.created,
            "model": self.model,
        }

    def _call_deltas(self, answer: int, call: ToolCall) -> list[Json]:
        """A delta with the call's name, and one with its arguments."""
        index = self._calls.get(answer, 0)
        self._calls[answer] = index + 1
        whole, given = self._call(call)
        kind = whole["type"]
        more = {"tool_calls": [{"index": index, kind: {given: whole[kind][given]}}]}
        whole[kind][given] = ""
        first: Json = {"tool_calls": [{"index": index, **whole}]}
        if answer not in self._begun:
            self._begun.add(answer)
            first["role"] = "assistant"
        return [first, more]

    def _call(self, call: ToolCall) -> tuple[Json, str]:
        """The call as JSON, and the name of the field that holds its arguments."""
        kind, given, name = "function", arguments_text(call), "arguments"
        text = text_given(call) if call.name in self.text_takers else None
        if text is not None:
            kind, given, name = "custom", text, "input"
        return {"id": new_id("call"), "type": kind, kind: {"name": call.name, name: given}}, name

    def _delta(self, piece: AnswerPiece) -> Json:
        if not self.chat:
            return {"text": piece.thought + piece.said}
        delta: Json = {}
        if piece.answer not in self._begun:
            self._begun.add(piece.answer)
            delta["role"] = "assistant"
        if piece.thought:
            delta["reasoning_content"] = piece.thought
        if piece.said:
            delta["content"] = piece.said
        return delta

    def _chunk(self, number: int, delta: Json, why: str | None, tokens: Sequence[Token]) -> Json:
        choice: Json = {
            "index": number,
            "finish_reason": why,
            "logprobs": self._logprobs(number, tokens),
        }
        choice |= {"delta": delta} if self.chat else delta
        chunk = {**self._frame(chunk=True), "choices": [choice]}
        if self.with_usage:
            chunk["usage"] = None
        return chunk

    def _choice(self, number: int, answer: _Answer) -> Json:
        choice: Json = {
            "index": number,
            "finish_reason": answer.why,
            "logprobs": self._logprobs(number, answer.tokens),
        }
        if not self.chat:
            return choice | {"text": answer.thought + answer.said}
        said = answer.said
        message: Json = {"role": "assistant", "content": said, "refusal": None}
        if answer.calls:
            message |= {"content": said.strip() or None, "tool_calls": answer.calls}
        if answer.thought:
            message["reasoning_content"] = answer.thought
        return choice | {"message": message}

    def _count(self, end: End) -> None:
        found = end.found_tokens
        self._found_tokens = found if self._found_tokens is None else min(found, self._found_tokens)
        self._new_tokens += end.new_tokens
        self._thought_tokens += end.thought_tokens

    def _usage(self) -> Json:
        return {
            "prompt_tokens": self._prompt_tokens,
            "prompt_tokens_details": {"cached_tokens": self._found_tokens or 0},
            "completion_tokens": self._new_tokens,
            "completion_tokens_details": {"reasoning_tokens": self._thought_tokens},
            "total_tokens": self._prompt_tokens + self._new_tokens,
        }

    def _logprobs(self, number: int, tokens: Sequence[Token]) -> Json | None:
        if not self.with_logprobs or not tokens:
            return None
        if self.chat:
            return {"content": logprobs_of(tokens), "refusal": None}
        return {
            "tokens": [_chosen(token)["token"] for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [_by_text(token.top_logprobs) for token in tokens],
            "text_offset": self._offsets(number, tokens),
        }

    def _offsets(self, number: int, tokens: Sequence[Token]) -> list[int]:
        """The offset in the answer at which each token begins."""
        offsets = []
        for token in tokens:
            offsets.append(self._said.get(number, 0))
            self._said[number] = offsets[-1] + len(token.text)
        return offsets


def logprobs_of(tokens: Sequence[Token]) -> list[Json]:
    """One object for each token, with the likeliest alternatives."""
    return [
        {
            **_chosen(token),
            "top_logprobs": [_described(each) for each in token.top_logprobs],
        }
        for token in tokens
    ]


def _why(end: End) -> str:
    return "tool_calls" if end.calls and end.why == "stop" else end.why


def _chosen(token: Token) -> Json:
    """The chosen token as JSON; a special token has an empty text."""
    if token.chosen is None or token.chosen.is_special:
        return {"token": "", "logprob": token.logprob, "bytes": []}
    return _described(token.chosen)


def _described(token: TokenLogprob) -> Json:
    return {"token": _token_text(token), "logprob": token.logprob, "bytes": list(token.bytes)}


def _token_text(token: TokenLogprob) -> str:
    """The token's text; a part of a character has its bytes, in OpenAI's spelling."""
    try:
        return token.bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{each:02x}" for each in token.bytes)


def _by_text(tokens: Sequence[TokenLogprob]) -> Mapping[str, float]:
    """Logprobs by the text of the token; the highest, if texts are equal."""
    return {_token_text(each): each.logprob for each in reversed(tokens)}
