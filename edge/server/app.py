"""The routes of the server and their handlers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from edge.api.async_model import AsyncModel
from edge.api.encoder_decoder import AsyncEncoderDecoder
from edge.errors import EdgeError, PromptLengthError, RequestError
from edge.protocol.peer_info import PeerInfo
from edge.server import (
    anthropic_messages,
    embeddings,
    ollama,
    openai_chat,
    openai_fields,
    openai_responses,
    openapi,
    rerank,
    streams,
    transcriptions,
)
from edge.server.answers import Answers, Happening, Question
from edge.server.cluster_view import cluster_view
from edge.server.fields import Fields, parse_body
from edge.server.gate import Gate
from edge.server.guard import Guard, Rules, dialect_of, says_anthropic
from edge.server.metrics import Metrics
from edge.server.model_pool import ModelPool
from edge.server.observer import Observer
from edge.server.page_files import page_routes
from edge.server.pictures import Fetch
from edge.server.previews import Previews
from edge.server.refusals import Refusal, refusal_of
from edge.server.tools import text_takers
from edge.weights.pooling import Pooling

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Speech:
    """A speech model, and its name for clients."""

    name: str
    export: AsyncEncoderDecoder

    def __post_init__(self) -> None:
        if not self.export.takes_sound:
            raise RequestError(
                f"{self.name} takes no sound", remedy="give --speech an export of Whisper's kind"
            )


T = TypeVar("T")

HEALTH = "/health"

MOST_ANSWERS = 128
"""Most answers under way or waiting. The scheduler runs some of them at once."""


class Server:
    """Serves models to any number of clients. `app` is the ASGI application."""

    def __init__(
        self,
        pool: ModelPool,
        *,
        rules: Rules,
        most_answers: int = MOST_ANSWERS,
        previews: Previews | None = None,
        candidates: Callable[[], Sequence[PeerInfo]] = tuple,
        pooling: Pooling | None = None,
        documents: Mapping[str, str] = MappingProxyType({}),
        fetch: Fetch | None = None,
        speech: Speech | None = None,
    ) -> None:
        """previews: plans other placements; None: it plans none. candidates: all peers that were
        ever seen, in addition to those of the models. pooling: of embeddings; None: as each model
        says. documents: kept texts by name, with which clients may begin. fetch: downloads images
        that are given by URL; None: they are refused. speech: what hears; None: nothing."""
        self._pool = pool
        self._observers: dict[str, tuple[AsyncModel, Observer]] = {}
        """An observer of each loaded model that a client has looked at."""
        self._previews, self._speech = previews, speech
        self._candidates = candidates
        self._created = int(time.time())
        self._metrics = Metrics()
        self.gate = Gate(most_answers)
        self._answers = Answers(
            pool, self.gate, self._metrics, pooling=pooling, documents=documents, fetch=fetch
        )
        routes: dict[str, tuple[str, Callable[[Request], Awaitable[Response]]]] = {
            HEALTH: ("GET", self._health),
            "/metrics": ("GET", self._show_metrics),
            "/api/cluster": ("GET", self._cluster),
            "/api/plan": ("GET", self._plan),
            "/api/plan/models": ("GET", self._plannable),
            "/v1/models": ("GET", self._models),
            "/v1/chat/completions": ("POST", self._openai_chat),
            "/v1/completions": ("POST", self._openai_completion),
            "/v1/responses": ("POST", self._openai_response),
            "/v1/embeddings": ("POST", self._openai_embeddings),
            "/v1/rerank": ("POST", self._rerank),
            "/v1/audio/transcriptions": ("POST", self._transcription),
            "/v1/messages": ("POST", self._anthropic_message),
            "/v1/messages/count_tokens": ("POST", self._anthropic_count),
            "/api/chat": ("POST", self._ollama_chat),
            "/api/generate": ("POST", self._ollama_generate),
            "/api/embed": ("POST", self._ollama_embed),
            "/api/embeddings": ("POST", self._ollama_embeddings),
            "/api/tags": ("GET", self._ollama_tags),
            "/api/show": ("POST", self._ollama_show),
            "/api/ps": ("GET", self._ollama_ps),
            "/api/version": ("GET", self._ollama_version),
            "/openapi.json": ("GET", self._document),
        }
        page = page_routes()
        app = Starlette(
            routes=[
                *page,
                *(Route(path, run, methods=[method]) for path, (method, run) in routes.items()),
                Route("/v1/models/{name:path}", self._one_model, methods=["GET"]),
            ],
            exception_handlers={
                Refusal: _on_refusal,
                EdgeError: _on_edge_error,
                HTTPException: _on_http_error,
                Exception: _on_defect,
            },
        )
        open_paths = [route.path for route in page]
        self.guard = Guard(
            app, rules, self._metrics, (*routes, *open_paths), open_paths=(HEALTH, *open_paths)
        )
        self.app: ASGIApp = self.guard

    async def _health(self, _request: Request) -> Response:
        """200 while the server answers; 503 once its only model is gone, or it shuts down."""
        models = self._pool.loaded.values()
        is_over = len(self._pool.names) == 1 and any(model.is_over for model in models)
        if is_over or self.gate.is_draining:
            return _Json({"status": "ending"}, 503)
        is_recovering = any(model.is_recovering for model in models)
        return _Json({"status": "recovering" if is_recovering else "ok"})

    async def _show_metrics(self, _request: Request) -> Response:
        self._metrics.note_models({name: name in self._pool.loaded for name in self._pool.names})
        for name, model in self._pool.loaded.items():
            self._metrics.note_work(name, model.work)
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")

    async def _cluster(self, request: Request) -> Response:
        """Shows the cluster of the model that `model` names, or that was used last."""
        loaded = self._pool.loaded
        asked = request.query_params.get("model")
        name = next(iter(loaded), None) if asked is None else self._pool.find(asked)
        if name is None or name not in loaded:
            raise Refusal(503, "the model is not loaded now; the next request for it loads it")
        model = loaded[name]
        if name not in self._observers or self._observers[name][0] is not model:
            self._observers[name] = (model, Observer(model, self._candidates))
        observed = await self._observers[name][1].look()
        view = cluster_view(model, observed, self._metrics, answers=self.gate.inside)
        models = [{"name": each, "is_loaded": each in loaded} for each in self._pool.names]
        return _Json(view | {"models": models})

    async def _plan(self, request: Request) -> Response:
        if self._previews is None:
            raise Refusal(404, "this server makes no plans for a changed cluster")
        query = request.query_params
        return _Json(
            await self._previews.view(
                query.get("model", self._pool.names[0]), query.getlist("change")
            )
        )

    async def _plannable(self, _request: Request) -> Response:
        names = [] if self._previews is None else await self._previews.names()
        return _Json({"models": names})

    async def _document(self, _request: Request) -> Response:
        return _Json(openapi.document(self._pool.known_as))

    async def _models(self, request: Request) -> Response:
        """The list of models: in Anthropic's format for its clients, else in OpenAI's."""
        names = self._pool.known_as
        if says_anthropic(request.headers.raw):
            found = [self._in_anthropic_words(each) for each in names]
            return _Json(anthropic_messages.page_of(found))
        return _Json({"object": "list", "data": [self._described(each) for each in names]})

    async def _one_model(self, request: Request) -> Response:
        name = self._known(request.path_params["name"])
        is_anthropic = says_anthropic(request.headers.raw)
        return _Json(self._in_anthropic_words(name) if is_anthropic else self._described(name))

    def _in_anthropic_words(self, name: str) -> Json:
        model = self._pool.loaded.get(self._pool.find(name))
        context_tokens = None if model is None else model.context_tokens
        return anthropic_messages.described(name, self._created, context_tokens)

    def _known(self, asked: str) -> str:
        name = self._pool.find(asked)
        return asked if asked in self._pool.known_as else name

    def _described(self, name: str) -> Json:
        model = self._pool.loaded.get(self._pool.find(name))
        length = {} if model is None else {"context_length": model.context_tokens}
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "edge",
            **length,
        }

    async def _openai_chat(self, request: Request) -> Response:
        name, body = await self._body(request)
        return await self._openai(request, name, body, openai_fields.chat_question(body), chat=True)

    async def _openai_completion(self, request: Request) -> Response:
        name, body = await self._body(request)
        question = openai_fields.completion_question(body)
        return await self._openai(request, name, body, question, chat=False)

    async def _openai(
        self, request: Request, name: str, body: Fields, question: Question, *, chat: bool
    ) -> Response:
        translator = openai_chat.ChatTranslator(
            model=name,
            chat=chat,
            with_logprobs=question.options.logprobs is not None,
            with_usage=openai_fields.wants_usage(body),
            text_takers=text_takers(body) if chat else frozenset(),
        )
        happenings = self._ask(request, question, name)
        if not body.flag("stream"):
            return _Json(await _unless_gone(request, translator.whole(happenings)))
        begun = await _begun(request, happenings)
        lines = streams.data_lines(translator.chunks(begun))
        return streams.events(lines, begun)

    async def _openai_response(self, request: Request) -> Response:
        name, body = await self._body(request)
        question = openai_responses.question_of(body)
        translator = openai_responses.ResponsesTranslator(model=name, question=question)
        happenings = self._ask(request, question, name)
        if not body.flag("stream"):
            return _Json(await _unless_gone(request, translator.whole(happenings)))
        try:
            begun = await _begun(request, happenings)
        except PromptLengthError as error:  # Codex looks for it only in the stream
            told = map(streams.named_line, translator.refused(refusal_of(error)))
            return Response("".join(told), media_type="text/event-stream")
        lines = streams.named_lines(translator.events(begun), translator.failed)
        return streams.events(lines, begun)

    async def _openai_embeddings(self, request: Request) -> Response:
        name, body = await self._body(request)
        asked = embeddings.openai_asked(body)
        vectors, tokens = await self._embedded(request, name, asked)
        return _Json(embeddings.openai_reply(asked, vectors, model=name, tokens=tokens))

    async def _rerank(self, request: Request) -> Response:
        name, body = await self._body(request)
        asked = rerank.rerank_asked(body)
        work = self._answers.rerank(asked, name, request.scope["edge.caller"])
        scores, tokens = await _unless_gone(request, work)
        return _Json(rerank.rerank_reply(asked, scores, model=name, tokens=tokens))

    async def _transcription(self, request: Request) -> Response:
        """The words of a sound. All that is asked of the model at once waits for its turn."""
        content_type = request.headers.get("content-type", "")
        asked = transcriptions.transcription_asked(content_type, await _whole_body(request))
        if self._speech is None:
            raise Refusal(404, "this server hears nothing; edge serve --speech FOLDER does")
        if asked.model not in (None, "default", "whisper-1", self._speech.name):
            raise Refusal(404, f"there is no speech model {asked.model!r:.80}")
        async with self.gate.entered(1, request.scope["edge.caller"]):
            work = self._speech.export.transcribe(asked.sound, language=asked.language)
            found = await _unless_gone(request, work)
        text = found.text if found.text is not None else " ".join(map(str, found.token_ids))
        if asked.as_text:
            return Response(text + "\n", media_type="text/plain")
        return _Json(transcriptions.transcription_reply(text))

    async def _embedded(
        self, request: Request, name: str, asked: embeddings.EmbeddingRequest
    ) -> tuple[NDArray[np.float32], int]:
        work = self._answers.embed(asked, name, request.scope["edge.caller"])
        return await _unless_gone(request, work)

    async def _ollama_embed(self, request: Request) -> Response:
        began_s = time.perf_counter()
        name, body = await self._body(request)
        vectors, tokens = await self._embedded(request, name, embeddings.ollama_asked(body))
        return _Json(embeddings.ollama_reply(vectors, model=name, tokens=tokens, began_s=began_s))

    async def _ollama_embeddings(self, request: Request) -> Response:
        name, body = await self._body(request)
        vectors, _tokens = await self._embedded(request, name, embeddings.ollama_prompt(body))
        return _Json({"embedding": vectors[0].tolist()})

    async def _anthropic_message(self, request: Request) -> Response:
        name, body = await self._body(request)
        question = anthropic_messages.question_of(body)
        longest = question.options.max_new_tokens
        translator = anthropic_messages.MessagesTranslator(model=name, longest=longest)
        happenings = self._ask(request, question, name)
        if not body.flag("stream"):
            return _Json(await _unless_gone(request, translator.whole(happenings)))
        begun = await _begun(request, happenings)
        lines = streams.named_lines(translator.events(begun), translator.failed)
        return streams.events(lines, begun, streams.named_line(anthropic_messages.PING))

    async def _anthropic_count(self, request: Request) -> Response:
        name, body = await self._body(request)
        question = anthropic_messages.question_of(body, counts_only=True)
        return _Json({"input_tokens": await self._answers.count(question, name)})

    async def _ollama_chat(self, request: Request) -> Response:
        return await self._ollama(request, ollama.chat_question, chat=True)

    async def _ollama_generate(self, request: Request) -> Response:
        return await self._ollama(request, ollama.generate_question, chat=False)

    async def _ollama(
        self, request: Request, read: Callable[[Fields], Question], *, chat: bool
    ) -> Response:
        name, body = await self._body(request)
        stay = ollama.stay_of(body)
        if ollama.asks_nothing(body, chat=chat):
            if stay is not None and stay.seconds == 0:
                self._pool.keep(name, 0.0)
                return _Json(ollama.nothing_said(name, "unload", chat=chat))
            async with self._pool.using(name):
                if stay is not None:
                    self._pool.keep(name, stay.seconds)
                return _Json(ollama.nothing_said(name, "load", chat=chat))
        question = read(body)
        translator = ollama.OllamaTranslator(model=name, chat=chat)
        happenings = self._ask(request, question, name)
        if stay is not None:
            happenings = self._keeping(happenings, name, stay)
        if body.raw("stream") is False:
            return _Json(await _unless_gone(request, translator.whole(happenings)))
        begun = await _begun(request, happenings)
        return streams.StreamedAnswer(
            streams.json_lines(translator.lines(begun)),
            begun,
            media_type="application/x-ndjson",
            sign=lambda: streams.json_line(translator.nothing()),
        )

    async def _keeping(
        self, happenings: AsyncGenerator[Happening], name: str, stay: ollama.Stay
    ) -> AsyncGenerator[Happening]:
        """These events. At their end, `stay` is applied unless the question was refused."""
        has_begun = False
        try:
            async with contextlib.aclosing(happenings):
                async for each in happenings:
                    has_begun = True
                    yield each
        finally:
            if has_begun:
                self._pool.keep(name, stay.seconds)

    async def _ollama_tags(self, _request: Request) -> Response:
        return _Json(
            {
                "models": [
                    ollama.described(each, self._created, self._facts(each))
                    for each in self._pool.known_as
                ]
            }
        )

    async def _ollama_ps(self, _request: Request) -> Response:
        running = [
            ollama.running(each, self._created, self._facts(each), self._pool.stays_s(each))
            for each in self._pool.loaded
        ]
        return _Json({"models": running})

    async def _ollama_show(self, request: Request) -> Response:
        """Facts about a model. Loads it first, because its capabilities are not known before."""
        body = parse_body(await _whole_body(request))
        asked = body.text("model") or body.text("name")
        if asked is None:
            raise body.refuse("model", "is missing")
        name = self._pool.find(asked)
        async with self._pool.using(name) as model:
            facts = _facts_of(model, await self._answers.capabilities(model))
        return _Json(ollama.shown(self._created, facts))

    def _facts(self, name: str) -> ollama.Facts | None:
        model = self._pool.loaded.get(self._pool.find(name))
        return None if model is None else _facts_of(model)

    async def _ollama_version(self, _request: Request) -> Response:
        return _Json({"version": ollama.VERSION})

    def _ask(self, request: Request, question: Question, name: str) -> AsyncGenerator[Happening]:
        return self._answers.ask(question, name, request.scope["edge.caller"])

    async def _body(self, request: Request) -> tuple[str, Fields]:
        """The name of the requested model, and the body."""
        body = parse_body(await _whole_body(request))
        return self._pool.find(body.need_text("model")), body


async def _whole_body(request: Request) -> bytes:
    try:
        return await request.body()
    except ClientDisconnect:
        raise _gone() from None


def _facts_of(model: AsyncModel, capabilities: Sequence[str] = ()) -> ollama.Facts:
    proposal = model.proposal
    return ollama.Facts(
        dtype=proposal.dtype,
        weight_bytes=sum(row.memory.weight_bytes for row in proposal.rows),
        context_tokens=model.context_tokens,
        hidden_size=model.hidden_size,
        capabilities=capabilities,
    )


async def _begun(request: Request, happenings: AsyncGenerator[Happening]) -> streams.BegunAnswer:
    """The answer, after its first event. An earlier error still sets the HTTP status, and the wait
    ends if the client goes away."""
    return streams.BegunAnswer(await _unless_gone(request, anext(happenings)), happenings)


async def _unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`. Cancels it and raises Refusal if the client goes away first."""
    doing = asyncio.ensure_future(work)

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    watching = asyncio.ensure_future(watch())
    try:
        await asyncio.wait([doing, watching], return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise _gone()
        return doing.result()
    finally:
        for task in (doing, watching):
            task.cancel()
        await asyncio.gather(doing, watching, return_exceptions=True)


def _gone() -> Refusal:
    """A refusal for logs and metrics only."""
    return Refusal(499, "the client has gone")


class _Json(Response):
    """A JSON body in ASCII, because a text of the client that is repeated may have half of a UTF-16
    pair, which UTF-8 cannot encode."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


async def _on_refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    body = error.body(dialect_of(request.scope))
    return _Json(body, error.status, headers=error.headers)


async def _on_edge_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, EdgeError)
    return await _on_refusal(request, refusal_of(error))


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = {404: "there is nothing at this path", 405: "this path takes another method"}
    return await _on_refusal(
        request, Refusal(error.status_code, what.get(error.status_code, error.detail))
    )


async def _on_defect(request: Request, _error: Exception) -> Response:
    return await _on_refusal(request, Refusal(500, "the server failed; its log says how"))
