"""What the server understands, as an OpenAPI document: for tools that make clients, or try it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from edge.server import bodies
from edge.server.bodies import plain_schema
from edge.version import __version__

Json = dict[str, Any]

_TEXT: Json = {"type": "string"}
_MODEL: Json = {"$ref": "#/components/schemas/Model"}

_BODIES: Mapping[str, tuple[str, type[msgspec.Struct]]] = {
    "/v1/chat/completions": ("An answer to a conversation, as OpenAI has it", bodies.Chat),
    "/v1/completions": ("What follows a text, as OpenAI has it", bodies.Completion),
    "/v1/responses": (
        "An answer to a conversation that is sent whole, as OpenAI has it",
        bodies.Response,
    ),
    "/v1/embeddings": ("A vector for each text, as OpenAI has it", bodies.Embeddings),
    "/v1/rerank": ("Documents by their relevance, as Cohere and Jina have it", bodies.Rerank),
    "/v1/messages": ("An answer to a conversation, as Anthropic has it", bodies.AnthropicMessages),
    "/v1/messages/count_tokens": (
        "How many tokens a conversation has, as Anthropic has it",
        bodies.CountedMessages,
    ),
    "/api/chat": ("An answer to a conversation, as Ollama has it", bodies.OllamaChat),
    "/api/generate": ("What follows a text, as Ollama has it", bodies.OllamaGenerate),
    "/api/show": ("What a model can do, as Ollama has it", msgspec.defstruct("Show", [])),
    "/api/embed": ("A vector for each text, as Ollama has it", bodies.OllamaEmbed),
    "/api/embeddings": ("A vector for one text, as Ollama had it", bodies.OllamaEmbeddings),
}
_LOOKS: Mapping[str, tuple[str, Mapping[str, Json]]] = {
    "/health": ("Whether it answers", {}),
    "/metrics": ("What it counts, for Prometheus", {}),
    "/api/cluster": ("What runs where, and how it is doing", {"model": _MODEL}),
    "/api/plan": (
        "The placement of a model, and how fast it should be",
        {"model": _TEXT, "change": {"type": "array", "items": _TEXT}},
    ),
    "/api/plan/models": ("Models that may be planned", {}),
    "/v1/models": ("The models, as OpenAI has it", {}),
    "/api/tags": ("The models, as Ollama has it", {}),
    "/api/ps": ("The models that are loaded, as Ollama has it", {}),
    "/api/version": ("Of Ollama's interface", {}),
    "/openapi.json": ("This document", {}),
}
_REFUSALS = {
    "400": "Something in the request is not as it must be; the error names it",
    "401": "A key is wanted, or another one",
    "404": "There is no such model",
    "405": "Another method is wanted",
    "408": "The body does not come",
    "413": "The body is too large",
    "429": "Too many requests of this client; come again after `Retry-After`",
    "503": "There is no room now; come again after `Retry-After`",
}


def document(names: Sequence[str]) -> Json:
    """OpenAPI 3.1, of a server with models of these names."""
    paths: Json = {}
    for path, (summary, body) in _BODIES.items():
        content = {"application/json": {"schema": _schema(body)}}
        paths[path] = {"post": _operation(summary, {"requestBody": _body(content)})}
    for path, (summary, query) in _LOOKS.items():
        asked = [{"name": name, "in": "query", "schema": of} for name, of in query.items()]
        paths[path] = {"get": _operation(summary, {"parameters": asked} if asked else {})}
    name = {"name": "name", "in": "path", "required": True, "schema": _MODEL}
    paths["/v1/models/{name}"] = {
        "get": _operation("One model, as OpenAI has it", {"parameters": [name]})
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Edge", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {"Model": {"enum": [*names, "default"]}},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _schema(body: type[msgspec.Struct]) -> Json:
    """What a body is: every one of them names a model."""
    schema = plain_schema(body)
    properties = {"model": _MODEL, **schema["properties"]}
    return {**schema, "required": ["model", *schema["required"]], "properties": properties}


def _body(content: Json) -> Json:
    return {"required": True, "content": content}


def _operation(summary: str, more: Json) -> Json:
    responses = {status: {"description": what} for status, what in _REFUSALS.items()}
    return {"summary": summary, **more, "responses": {"200": {"description": "Done"}, **responses}}
