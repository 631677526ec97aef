"""Answers to clients' requests, as a stream of events that is the same for every dialect."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from edge.answers.terms import GenerationOptions
from edge.answers.text import Token
from edge.api.async_model import AsyncModel
from edge.api.kept_documents import conversation_after
from edge.api.reply import AsyncReplyStream
from edge.api.tool_choice import with_calls
from edge.concurrency.blocking import run_blocking
from edge.errors import EdgeError, RequestError, shown
from edge.models.pictures import Tile
from edge.pictures.messages import has_pictures
from edge.server.efforts import switched
from edge.server.embeddings import EmbeddingRequest
from edge.server.gate import Gate
from edge.server.history import arranged
from edge.server.keys import Caller
from edge.server.metrics import Metrics
from edge.server.model_pool import ModelPool
from edge.server.pictures import Fetch, downloaded
from edge.server.refusals import Refusal
from edge.server.rerank import RerankRequest, relevance
from edge.text.answer_parts import AnswerPart, Said, Thought, ToolCall
from edge.text.infill import infill_prompt
from edge.text.tokenizer import Tokenizer
from edge.weights.pooling import Pooling

Ending = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One request: messages for the chat template, or prompts to continue."""

    messages: Sequence[Mapping[str, object]] = ()
    prompts: Sequence[str | Sequence[int]] = ()
    """Each prompt gets `answers` answers; those of the first prompt come first."""
    suffix: str = ""
    """Text after the answer (infill). All prompts must then be texts."""
    options: GenerationOptions = field(default_factory=GenerationOptions)
    answers: int = 1
    """Number of answers to each prompt."""
    tools: Sequence[Mapping[str, object]] = ()
    """Schemas of the tools that the model may call."""
    variables: Mapping[str, object] = field(default_factory=dict)
    """Further variables of the chat template."""
    forced: Sequence[Mapping[str, object]] = ()
    """The answer must call one of these tools."""
    several_calls: bool = True
    """Whether an answer may call more than one tool."""
    cache_salt: str = ""
    """Only prompts with the same salt share cached prefixes."""
    told_back: Mapping[str, object] = field(default_factory=dict)
    """Fields of the request that the reply repeats, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPiece:
    """The next part of one of the answers."""

    answer: int
    """Index of the answer."""
    thought: str = ""
    said: str = ""
    calls: tuple[ToolCall, ...] = ()
    tokens: tuple[Token, ...] = ()
    """The tokens since the last piece, if logprobs were asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """An answer is over."""

    answer: int
    why: Ending
    new_tokens: int
    calls: int = 0
    """Number of tool calls in the whole answer."""
    found_tokens: int = 0
    """Tokens of the prompt that were found in the prefix cache."""
    thought_tokens: int = 0
    """New tokens of thoughts."""
    stopped_by: str | None = None
    """The stop string that ended the answer, if one did."""
    first_token_s: float = 0.0
    """Seconds from the begin of the answer to the arrival of its first token."""
    decode_s: float = 0.0
    """Seconds from the first token to the last, measured where they are sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """The prompt was read and counted; pieces follow."""

    prompt_tokens: int


Happening = Begin | AnswerPiece | End

_SOME_TOOL = {"type": "function", "function": {"name": "x", "description": "", "parameters": {}}}


class Answers:
    """Asks models for clients, within the limits of `gate`. `name` is the name of a model."""

    def __init__(
        self,
        pool: ModelPool,
        gate: Gate,
        metrics: Metrics,
        *,
        pooling: Pooling | None = None,
        documents: Mapping[str, str] = MappingProxyType({}),
        fetch: Fetch | None = None,
    ) -> None:
        """documents: kept texts by name, with which clients may begin. fetch: downloads pictures
        that are given by URL; None: they are refused."""
        self._fetch = fetch
        self._pool = pool
        self._documents = documents
        self._pooling = pooling
        self._gate = gate
        self._metrics = metrics

    async def count(self, question: Question, name: str) -> int:
        """Number of tokens of the prompt."""
        async with self._pool.using(name) as model:
            prompts, _tiles = await self._prompts(model, question)
            return len(prompts[0])

    async def capabilities(self, model: AsyncModel) -> Sequence[str]:
        """The model's capabilities, by Ollama's names."""
        found = ["completion", "embedding"]
        if infill_prompt(partial(_is_token, model.tokenizer), "", "") is not None:
            found.append("insert")
        if not model.can_chat:
            return found
        if model.reads_pictures:
            found.append("vision")
        asked = [{"role": "user", "content": "x"}]
        encode = partial(model.tokenizer.encode_chat, asked)
        try:
            plain = await run_blocking(encode)
            if plain != await run_blocking(partial(encode, tools=[_SOME_TOOL])):
                found.append("tools")
            off, on = (partial(encode, variables=switched(thinks)) for thinks in (False, True))
            if await run_blocking(off) != await run_blocking(on):
                found.append("thinking")
        except EdgeError:  # the template needs more than one message, or is broken
            pass
        return found

    async def embed(
        self, asked: EmbeddingRequest, name: str, caller: Caller
    ) -> tuple[NDArray[np.float32], int]:
        """A vector of each input [inputs, dimensions], and the number of tokens of all inputs.

        Raises as `ask` does. All inputs together count as one answer.
        """
        async with self._gate.entered(1, caller), self._pool.using(name) as model:
            prompts = [
                model.tokenizer.encode(each) if isinstance(each, str) else list(each)
                for each in asked.inputs
            ]
            if asked.cuts:
                prompts = [each[: model.context_tokens] for each in prompts]
            tokens = sum(map(len, prompts))
            observed = self._metrics.reply(tokens)
            try:
                vectors = await model.embed(
                    prompts,
                    pooling=self._pooling,
                    dimensions=asked.dimensions,
                    client=caller.name,
                    priority=caller.priority(asked.priority),
                )
                observed.end("finished")
            finally:
                observed.end("given up")
        return vectors, tokens

    async def rerank(
        self, asked: RerankRequest, name: str, caller: Caller
    ) -> tuple[list[float], int]:
        """The relevance of each document, and the tokens of all prompts. Together they count as one
        answer."""
        async with self._gate.entered(1, caller), self._pool.using(name) as model:
            observed = self._metrics.reply(0)
            try:
                found = await relevance(model, asked, caller)
                observed.end("finished")
            finally:
                observed.end("given up")
        return found

    async def ask(self, question: Question, name: str, caller: Caller) -> AsyncGenerator[Happening]:
        """The events of all answers, until the last one ends. Closing the generator ends them.

        Raises Refusal if too many answers are under way, and the errors of the model.
        """
        async with (
            self._gate.entered(question.answers * (len(question.prompts) or 1), caller),
            self._pool.using(name) as model,
        ):
            prompts, tiles = await self._prompts(model, question)
            options = with_calls(
                question.options,
                model.tokenizer.answer_form,
                tools=question.tools,
                must=question.forced,
                several=question.several_calls,
            )
            options = replace(
                options, priority=caller.priority(options.priority), context=()
            )  # whose texts are in the prompts
            question = replace(question, options=options)
            if question.options.has_grammar:
                await model.check_grammar(prompts[0], question.options, tiles)
            async with contextlib.AsyncExitStack() as stack:
                answers = []
                count = question.answers * len(prompts)
                for number in range(count):
                    prompt = prompts[number // question.answers]
                    named = replace(caller, request_id=_id_of(caller.request_id, number, count))
                    stream = self._stream(model, question, prompt, tiles, number, named)
                    await stack.enter_async_context(stream)
                    answer = self._one(stream, question, len(prompt), number)
                    answers.append(await stack.enter_async_context(contextlib.aclosing(answer)))
                yield Begin(prompt_tokens=sum(map(len, prompts)))
                async for each in answers[0] if len(answers) == 1 else _merged(answers):
                    yield each

    def _stream(
        self,
        model: AsyncModel,
        question: Question,
        prompt: Sequence[int],
        tiles: Sequence[Tile],
        number: int,
        caller: Caller,
    ) -> AsyncReplyStream:
        """The model's stream for one answer; raises an error for a question it cannot take."""
        options = question.options
        again = number % question.answers
        if again and options.seed is not None:
            options = replace(options, seed=options.seed + again)
        salt = "\0".join(filter(None, (caller.cache_salt, question.cache_salt)))
        return model.stream(
            prompt,
            options,
            chat_tools=question.tools if question.messages else None,
            tiles=tiles,
            client=caller.name,
            cache_salt=salt,
            id=caller.request_id,
        )

    async def _prompts(
        self, model: AsyncModel, question: Question
    ) -> tuple[Sequence[Sequence[int]], Sequence[Tile]]:
        """Token ids of each prompt, and the tiles of a conversation's pictures."""
        tokenizer = model.tokenizer
        names = question.options.context
        if len(set(names)) < len(names):
            raise Refusal(400, "context names a document twice", param="context")
        texts = [self._document(name) for name in names]
        if not question.messages:
            if texts:
                why = "begins a conversation; ask for one, or leave it out"
                raise Refusal(400, f"context {why}", param="context")
            if question.suffix:
                return [_between(tokenizer, each, question.suffix) for each in question.prompts], ()
            return [
                tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
                for prompt in question.prompts
            ], ()
        messages, tools, pictures = question.messages, question.tools or None, None
        if has_pictures(messages):
            messages = await run_blocking(partial(downloaded, messages, self._fetch))
            messages, pictures = await run_blocking(partial(model.read_pictures, messages))
        if texts:
            begun = partial(conversation_after, tokenizer, messages, texts)
            messages = await run_blocking(begun)
        variables = dict(question.variables)
        encode = partial(tokenizer.encode_chat, tools=tools, variables=variables, pictures=pictures)
        ways = arranged(messages)
        refused = None
        while True:
            try:
                ids = await run_blocking(partial(encode, messages))
                break
            except RequestError as error:
                refused = refused or error
                if (other := await run_blocking(lambda: next(ways, None))) is None:
                    raise refused from None
                messages = other
        has_told = partial(
            tokenizer.has_told_tools, ids, messages, variables=variables, pictures=pictures
        )
        if tools is not None and not await run_blocking(has_told):
            raise Refusal(400, "the model's chat template takes no tools", param="tools")
        return [ids], () if pictures is None else pictures.tiles

    def _document(self, name: str) -> str:
        if name not in self._documents:
            raise Refusal(400, f"no document {shown(name)} is served", param="context")
        return self._documents[name]

    async def _one(
        self,
        stream: AsyncReplyStream,
        question: Question,
        prompt_tokens: int,
        number: int,
    ) -> AsyncGenerator[AnswerPiece | End]:
        """The events of one answer. Drops further calls if only one is allowed."""
        held: list[Token] = []
        tells_tokens = question.options.logprobs is not None
        count = calls = thought_tokens = unsettled = 0
        observed = self._metrics.reply(prompt_tokens)
        try:
            async for token in stream:
                count += 1
                observed.token(token.chosen_s)
                if tells_tokens:
                    held.append(token)
                unsettled += 1
                if token.parts:
                    # A mark between thoughts and text counts as part of what follows it.
                    thought_tokens += unsettled * isinstance(token.parts[0], Thought)
                    unsettled = 0
                for thought, said, called in _pieces(token.parts):
                    if called and calls and not question.several_calls:
                        continue
                    calls += len(called)
                    yield AnswerPiece(
                        answer=number,
                        thought=thought,
                        said=said,
                        calls=called,
                        tokens=tuple(held),
                    )
                    held.clear()
                if token.finish_reason is not None:
                    if held:
                        yield AnswerPiece(answer=number, tokens=tuple(held))
                    observed.end("finished")
                    found = stream.reply().statistics.get("found_tokens", 0)
                    yield End(
                        answer=number,
                        why=token.finish_reason,
                        new_tokens=count,
                        calls=calls,
                        found_tokens=found,
                        thought_tokens=thought_tokens,
                        stopped_by=token.stopped_by,
                        first_token_s=observed.first_token_s,
                        decode_s=observed.decode_s,
                    )
        finally:
            observed.end("given up")


def _is_token(tokenizer: Tokenizer, text: str) -> bool:
    return tokenizer.token_id(text) is not None


def _between(tokenizer: Tokenizer, before: str | Sequence[int], behind: str) -> Sequence[int]:
    """The infill prompt for these texts. Raises Refusal if the model has no infill tokens."""
    if not isinstance(before, str):
        raise Refusal(400, "a suffix needs a prompt that is a text", param="suffix")
    prompt = infill_prompt(partial(_is_token, tokenizer), before, behind)
    if prompt is None:
        raise Refusal(
            400,
            "suffix is not for this model: its tokenizer has no infill tokens; use a model that "
            "was trained for infill, such as Qwen Coder",
            param="suffix",
        )
    return tokenizer.encode(prompt)


def _id_of(request_id: str | None, number: int, count: int) -> str | None:
    return request_id if request_id is None or count == 1 else f"{request_id}-{number}"


def _pieces(parts: Sequence[AnswerPart]) -> Iterator[tuple[str, str, tuple[ToolCall, ...]]]:
    """(thought, text, calls) of each part."""
    for part in parts:
        if isinstance(part, ToolCall):
            yield "", "", (part,)
        elif isinstance(part, Said):
            if part.text:
                yield "", part.text, ()
        else:
            yield part.text, "", ()


async def _merged(
    streams: Sequence[AsyncGenerator[AnswerPiece | End]],
) -> AsyncGenerator[AnswerPiece | End]:
    """The events of all streams, in the order in which they arrive."""
    queue: asyncio.Queue[AnswerPiece | End | None] = asyncio.Queue()

    async def pour(stream: AsyncGenerator[AnswerPiece | End]) -> None:
        async for each in stream:
            queue.put_nowait(each)

    tasks = [asyncio.ensure_future(pour(stream)) for stream in streams]
    for task in tasks:
        task.add_done_callback(lambda _task: queue.put_nowait(None))
    try:
        left = len(tasks)
        while left:
            event = await queue.get()
            if event is None:
                left -= 1
            else:
                yield event
        for task in tasks:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
