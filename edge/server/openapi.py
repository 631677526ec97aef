"""The OpenAPI document of the server, for generators of clients and API explorers."""

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

_FORM: Json = {
    "type": "object",
    "required": ["file"],
    "properties": {
        "file": {"type": "string", "format": "binary", "description": "A WAV file"},
        "model": _TEXT,
        "language": {"type": "string", "description": "Such as en; otherwise it is found"},
        "response_format": {"enum": ["json", "text"]},
        "temperature": {"type": "number", "const": 0},
    },
}

_BODIES: Mapping[str, tuple[str, type[msgspec.Struct]]] = {
    "/v1/chat/completions": ("OpenAI: answer a conversation", bodies.Chat),
    "/v1/completions": ("OpenAI: complete a text", bodies.Completion),
    "/v1/responses": ("OpenAI: answer a conversation that is sent whole", bodies.Response),
    "/v1/embeddings": ("OpenAI: embed texts", bodies.Embeddings),
    "/v1/rerank": ("Cohere and Jina: order documents by their relevance", bodies.Rerank),
    "/v1/messages": ("Anthropic: answer a conversation", bodies.AnthropicMessages),
    "/v1/messages/count_tokens": (
        "Anthropic: count the tokens of a conversation",
        bodies.CountedMessages,
    ),
    "/api/chat": ("Ollama: answer a conversation", bodies.OllamaChat),
    "/api/generate": ("Ollama: complete a text", bodies.OllamaGenerate),
    "/api/show": ("Ollama: facts about a model", msgspec.defstruct("Show", [])),
    "/api/embed": ("Ollama: embed texts", bodies.OllamaEmbed),
    "/api/embeddings": ("Ollama's older interface: embed one text", bodies.OllamaEmbeddings),
}
_LOOKS: Mapping[str, tuple[str, Mapping[str, Json]]] = {
    "/health": ("The health of the server", {}),
    "/metrics": ("Metrics for Prometheus", {}),
    "/api/cluster": ("The plan of a loaded model, and its state", {"model": _MODEL}),
    "/api/plan": (
        "The plan of a model on a changed cluster, and its predicted speed",
        {"model": _TEXT, "change": {"type": "array", "items": _TEXT}},
    ),
    "/api/plan/models": ("Models that can be planned", {}),
    "/v1/models": ("OpenAI: list the models", {}),
    "/api/tags": ("Ollama: list the models", {}),
    "/api/ps": ("Ollama: list the loaded models", {}),
    "/api/version": ("Version of Ollama's API", {}),
    "/openapi.json": ("This document", {}),
}
_REFUSALS = {
    "400": "The request is invalid; the error names the field",
    "401": "The API key is missing or wrong",
    "404": "There is no such model",
    "405": "This path takes another method",
    "408": "The body did not arrive in time",
    "413": "The body is too large",
    "429": "Too many requests of this client; try again after `Retry-After`",
    "503": "There is no room now; try again after `Retry-After`",
}


def document(names: Sequence[str]) -> Json:
    """An OpenAPI 3.1 document of a server with models of these names."""
    paths: Json = {}
    for path, (summary, body) in _BODIES.items():
        content = {"application/json": {"schema": _schema(body)}}
        paths[path] = {"post": _operation(summary, {"requestBody": _body(content)})}
    form = {"schema": _FORM}
    paths["/v1/audio/transcriptions"] = {
        "post": _operation(
            "OpenAI: the words of a sound",
            {"requestBody": _body({"multipart/form-data": form})},
        )
    }
    for path, (summary, query) in _LOOKS.items():
        asked = [{"name": name, "in": "query", "schema": of} for name, of in query.items()]
        paths[path] = {"get": _operation(summary, {"parameters": asked} if asked else {})}
    name = {"name": "name", "in": "path", "required": True, "schema": _MODEL}
    paths["/v1/models/{name}"] = {"get": _operation("OpenAI: one model", {"parameters": [name]})}
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
    """The schema of a body, with the field `model` that all bodies have."""
    schema = plain_schema(body)
    properties = {"model": _MODEL, **schema["properties"]}
    return {**schema, "required": ["model", *schema["required"]], "properties": properties}


def _body(content: Json) -> Json:
    return {"required": True, "content": content}


def _operation(summary: str, more: Json) -> Json:
    responses = {status: {"description": what} for status, what in _REFUSALS.items()}
    return {"summary": summary, **more, "responses": {"200": {"description": "Done"}, **responses}}
