"""What the server understands, as an OpenAPI document: for tools that make clients, or try it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edge.scheduling.fairness import PRIORITIES
from edge.server.efforts import EFFORTS
from edge.server.embeddings import MOST_INPUTS
from edge.server.openai_fields import (
    MOST_ANSWERS,
    MOST_COMPLETIONS,
    MOST_LOGPROBS,
    MOST_STOPS,
    SEEDS,
)
from edge.server.priorities import TIERS
from edge.version import __version__

Json = dict[str, Any]

_TEXT: Json = {"type": "string"}
_FLAG: Json = {"type": "boolean"}
_OBJECT: Json = {"type": "object"}
_TOKEN: Json = {"type": "integer", "minimum": 0}
_MODEL: Json = {"$ref": "#/components/schemas/Model"}


def _whole(least: int, most: int | None = None) -> Json:
    return {"type": "integer", "minimum": least} | ({} if most is None else {"maximum": most})


def _number(least: float, most: float) -> Json:
    return {"type": "number", "minimum": least, "maximum": most}


def _list(of: Json, least: int = 0, most: int | None = None) -> Json:
    found: Json = {"type": "array", "items": of, "minItems": least}
    return found if most is None else found | {"maxItems": most}


def _either(*schemas: Json) -> Json:
    return {"anyOf": list(schemas)}


def _object(needed: Mapping[str, Json], others: Mapping[str, Json] | None = None) -> Json:
    return {
        "type": "object",
        "required": list(needed),
        "properties": {**needed, **(others or {})},
    }


def _asked(needed: Mapping[str, Json], others: Mapping[str, Json] | None = None) -> Json:
    """The body of a request: every one of them names a model."""
    return _object({"model": _MODEL, **needed}, others)


_STOP = _either(_TEXT, _list({**_TEXT, "minLength": 1}, most=MOST_STOPS))
_PARTS = _list(_object({"type": {"const": "text"}, "text": _TEXT}))
_CONTENT = _either(_TEXT, _PARTS)
_FUNCTION = _object(
    {"name": {**_TEXT, "pattern": "^[a-zA-Z0-9_-]{1,64}$"}},
    {"description": _TEXT, "parameters": _OBJECT},
)
_OPENAI_MESSAGE = _object(
    {"role": {"enum": ["system", "developer", "user", "assistant"]}, "content": _CONTENT}
)
_EFFORT: Json = {"enum": list(EFFORTS)}
_PRIORITY: Json = {"enum": list(PRIORITIES)}
_URGENCY = {"priority": _PRIORITY, "service_tier": {"enum": list(TIERS)}}
_SAMPLING = {
    "temperature": _number(0, 2),
    "top_p": _number(0, 1),
    "top_k": _whole(0),
    "min_p": _number(0, 1),
    "repetition_penalty": _number(0.01, 100),
    "frequency_penalty": _number(-2, 2),
    "presence_penalty": _number(-2, 2),
    "seed": _whole(-SEEDS, SEEDS - 1),
    "stop": _STOP,
}
_STAYS = _either({"type": "number"}, _TEXT)
_FORMAT = _object(
    {"type": {"enum": ["text", "json_object", "json_schema"]}}, {"json_schema": _OBJECT}
)
_OPENAI_TOOLS = _list(_object({"type": {"const": "function"}, "function": _FUNCTION}))
_FLAT_TOOLS = _list({**_FUNCTION, "required": ["type", "name"]})
_OPTIONS = _object(
    {},
    {
        "num_predict": _whole(-2),
        "temperature": _number(0, 2),
        "top_p": _number(0, 1),
        "top_k": _whole(-1),
        "min_p": _number(0, 1),
        "repeat_penalty": _number(0.01, 100),
        "frequency_penalty": _number(-2, 2),
        "presence_penalty": _number(-2, 2),
        "stop": _STOP,
        "seed": _whole(-1, 1 << 53),
    },
)

_BODIES: Mapping[str, tuple[str, Json]] = {
    "/v1/chat/completions": (
        "An answer to a conversation, as OpenAI has it",
        _asked(
            {"messages": _list(_OPENAI_MESSAGE, least=1)},
            {
                "max_completion_tokens": _whole(1),
                "max_tokens": _whole(1),
                "n": _whole(1, MOST_ANSWERS),
                "stream": _FLAG,
                "stream_options": _object({}, {"include_usage": _FLAG}),
                "logprobs": _FLAG,
                "top_logprobs": _whole(0, MOST_LOGPROBS),
                "response_format": _FORMAT,
                "tools": _OPENAI_TOOLS,
                "tool_choice": _either({"enum": ["auto", "none", "required"]}, _OBJECT),
                "parallel_tool_calls": _FLAG,
                "cache_salt": _TEXT,
                "chat_template_kwargs": _OBJECT,
                "reasoning_effort": _EFFORT,
                **_SAMPLING,
                **_URGENCY,
            },
        ),
    ),
    "/v1/completions": (
        "What follows a text, as OpenAI has it",
        _asked(
            {
                "prompt": _either(
                    {**_TEXT, "minLength": 1},
                    _list({**_TEXT, "minLength": 1}, least=1, most=MOST_COMPLETIONS),
                    _list(_TOKEN, least=1),
                    _list(_list(_TOKEN, least=1), least=1, most=MOST_COMPLETIONS),
                )
            },
            {
                "cache_salt": _TEXT,
                "suffix": _TEXT,
                "response_format": _FORMAT,
                "max_tokens": _whole(1),
                "n": _whole(1, MOST_ANSWERS),
                "stream": _FLAG,
                "logprobs": _whole(0, MOST_LOGPROBS),
                **_SAMPLING,
                **_URGENCY,
            },
        ),
    ),
    "/v1/responses": (
        "An answer to a conversation that is sent whole, as OpenAI has it",
        _asked(
            {"input": _either(_TEXT, _list(_OPENAI_MESSAGE, least=1))},
            {
                "cache_salt": _TEXT,
                "instructions": _TEXT,
                "max_output_tokens": _whole(1),
                "include": _list({**_TEXT, "minLength": 1}, most=32),
                "top_logprobs": _whole(0, MOST_LOGPROBS),
                "stream": _FLAG,
                "text": _object({}, {"format": _FORMAT}),
                "reasoning": _object({}, {"effort": _EFFORT}),
                "tools": _FLAT_TOOLS,
                "tool_choice": _either({"enum": ["auto", "none", "required"]}, _OBJECT),
                "parallel_tool_calls": _FLAG,
                **_SAMPLING,
                **_URGENCY,
            },
        ),
    ),
    "/v1/embeddings": (
        "A vector for each text, as OpenAI has it",
        _asked(
            {
                "input": _either(
                    {**_TEXT, "minLength": 1},
                    _list({**_TEXT, "minLength": 1}, least=1, most=MOST_INPUTS),
                    _list(_TOKEN, least=1),
                    _list(_list(_TOKEN, least=1), least=1, most=MOST_INPUTS),
                )
            },
            {
                "encoding_format": {"enum": ["float", "base64"]},
                "dimensions": _whole(1),
                **_URGENCY,
            },
        ),
    ),
    "/v1/messages": (
        "An answer to a conversation, as Anthropic has it",
        _asked(
            {
                "max_tokens": _whole(1),
                "messages": _list(
                    _object({"role": {"enum": ["user", "assistant"]}, "content": _CONTENT}),
                    least=1,
                ),
            },
            {
                "system": _CONTENT,
                "stream": _FLAG,
                "temperature": _number(0, 1),
                "top_p": _number(0, 1),
                "top_k": _whole(0),
                "stop_sequences": _list({**_TEXT, "minLength": 1}, most=MOST_STOPS),
                "tools": _list(
                    _object({"name": _FUNCTION["properties"]["name"], "input_schema": _OBJECT})
                ),
                "tool_choice": _object({"type": {"enum": ["auto", "none", "any", "tool"]}}),
                "thinking": _object(
                    {"type": {"enum": ["enabled", "adaptive", "between_tools", "disabled"]}}
                ),
                "output_config": _object({}, {"effort": _EFFORT}),
                "cache_salt": _TEXT,
                "priority": _PRIORITY,
            },
        ),
    ),
    "/v1/messages/count_tokens": (
        "How many tokens a conversation has, as Anthropic has it",
        _asked(
            {
                "messages": _list(
                    _object({"role": {"enum": ["user", "assistant"]}, "content": _CONTENT}),
                    least=1,
                )
            },
            {"system": _CONTENT},
        ),
    ),
    "/api/chat": (
        "An answer to a conversation, as Ollama has it",
        _asked(
            {},
            {
                "messages": _list(_OPENAI_MESSAGE),
                "stream": _FLAG,
                "keep_alive": _STAYS,
                "think": _either(_FLAG, _EFFORT),
                "format": _either({"const": "json"}, _OBJECT),
                "options": _OPTIONS,
                "tools": _OPENAI_TOOLS,
                "cache_salt": _TEXT,
                "priority": _PRIORITY,
            },
        ),
    ),
    "/api/generate": (
        "What follows a text, as Ollama has it",
        _asked(
            {},
            {
                "prompt": _TEXT,
                "suffix": _TEXT,
                "system": _TEXT,
                "raw": _FLAG,
                "keep_alive": _STAYS,
                "stream": _FLAG,
                "think": _either(_FLAG, _EFFORT),
                "format": _either({"const": "json"}, _OBJECT),
                "options": _OPTIONS,
                "cache_salt": _TEXT,
                "priority": _PRIORITY,
            },
        ),
    ),
    "/api/show": ("What a model can do, as Ollama has it", _object({"model": _MODEL})),
    "/api/embed": (
        "A vector for each text, as Ollama has it",
        _asked(
            {"input": _either(_TEXT, _list({**_TEXT, "minLength": 1}, least=1, most=MOST_INPUTS))},
            {"truncate": _FLAG, "dimensions": _whole(1), "priority": _PRIORITY},
        ),
    ),
    "/api/embeddings": (
        "A vector for one text, as Ollama had it",
        _asked({"prompt": {**_TEXT, "minLength": 1}}, {"priority": _PRIORITY}),
    ),
}
_LOOKS: Mapping[str, tuple[str, Mapping[str, Json]]] = {
    "/health": ("Whether it answers", {}),
    "/metrics": ("What it counts, for Prometheus", {}),
    "/api/cluster": ("What runs where, and how it is doing", {"model": _MODEL}),
    "/api/plan": (
        "The placement of a model, and how fast it should be",
        {"model": _TEXT, "change": _list(_TEXT)},
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
        content = {"application/json": {"schema": body}}
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


def _body(content: Json) -> Json:
    return {"required": True, "content": content}


def _operation(summary: str, more: Json) -> Json:
    responses = {status: {"description": what} for status, what in _REFUSALS.items()}
    return {"summary": summary, **more, "responses": {"200": {"description": "Done"}, **responses}}
