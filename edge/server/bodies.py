"""Bodies of requests as types: the names, kinds and ranges of fields. OpenAPI is made from these.

Each dialect reads fields of several kinds itself: parts of messages, items, tools. Fields that are
not named here are ignored, or refused by the dialect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from edge.kernels.sampling.parameters import Penalty, RepetitionPenalty, Share, TokenCount
from edge.protocol.step import Speculation
from edge.scheduling.fairness import Priority
from edge.server.efforts import Effort
from edge.server.priorities import Tier

MOST_STOPS = 16
MOST_ANSWERS = 16
MOST_LOGPROBS = 20
MOST_COMPLETIONS = 128
"""Most answers to all prompts of one request."""
MOST_INPUTS = 2048
"""Most inputs of one request for embeddings, as in OpenAI's API."""
MOST_TOOLS = 256
MOST_DOCUMENTS = 16
"""Most kept documents that one prompt begins with."""
MOST = 1 << 53
"""Largest whole number: JSON readers that use doubles read all up to it exactly."""
SEEDS = 1 << 63
"""Seeds begin at minus this number, as in OpenAI's API. Further answers of a request take the next
seeds, which must be below 2^64."""

Json = dict[str, Any]
Count = Annotated[int, Meta(ge=1, le=MOST)]
Temperature = Annotated[float, Meta(ge=0, le=2)]
"""The range of OpenAI and Ollama; Edge itself has no upper limit."""
_TopK = Annotated[int, Meta(ge=-1, lt=1 << 31)]
"""-1 and 0 mean all tokens."""
_Word = Annotated[str, Meta(min_length=1)]
_Words = Annotated[list[_Word], Meta(max_length=MOST_STOPS)]
_Name = Annotated[
    Any, Meta(extra_json_schema={"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,64}$"})
]
_Description = Annotated[Any, Meta(extra_json_schema={"type": "string"})]
_Parameters = Annotated[Any, Meta(extra_json_schema={"type": "object"})]
"""The schema of a tool's arguments. Tools that a service would run may have anything here."""
_TokenId = Annotated[int, Meta(ge=0, lt=10**9)]
_Bias = Annotated[float, Meta(ge=-100, le=100)]


def _inputs(most: int) -> Json:
    """Schema of a text, token ids, or a list of either; types cannot say that a list has one
    kind."""
    text: Json = {"type": "string", "minLength": 1}
    ids: Json = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
    lists = ({"type": "array", "items": of, "minItems": 1, "maxItems": most} for of in (text, ids))
    return {"anyOf": [text, ids, *lists]}


class _Body(Struct, kw_only=True):
    """Fields of most bodies. null counts as absent. The routes read `model`."""

    cache_salt: str | None = None
    priority: Priority | None = None
    speculate: Speculation | None = None
    stream: bool | None = None


class MessagePart(Struct, kw_only=True):
    type: str
    text: str | None = None
    image_url: str | Json | None = None
    """The image of an image_url part: a data URL, or an object that has it as url."""


_Role = Literal["system", "developer", "user", "assistant", "tool"]


class Message(Struct, kw_only=True):
    """A message of a conversation in OpenAI's and Ollama's APIs."""

    role: _Role
    content: str | list[MessagePart] | None = None


class _Function(Struct, kw_only=True):
    name: _Name
    description: _Description = None
    parameters: _Parameters = None


class _Tool(Struct, kw_only=True):
    type: str
    function: _Function | None = None
    custom: Json | None = None


_Tools = Annotated[list[_Tool], Meta(max_length=MOST_TOOLS)]
_Choice = Literal["auto", "none", "required"] | Json


class _Schema(Struct, kw_only=True):
    schema: Json | None = None


class Form(Struct, kw_only=True):
    """The form that an answer must have."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: _Schema | None = None
    schema: Json | None = None
    """The schema, in dialects that have it beside the type."""


_Documents = Annotated[list[_Word], Meta(max_length=MOST_DOCUMENTS)]


class OpenAIBody(_Body, kw_only=True):
    """Sampling and the other fields of all of OpenAI's dialects."""

    context: _Documents | None = None
    min_tokens: TokenCount | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: _TopK | None = None
    min_p: Share | None = None
    repetition_penalty: RepetitionPenalty | None = None
    repeat_penalty: RepetitionPenalty | None = None
    """The same, as llama.cpp has it."""
    stop_token_ids: Annotated[list[_TokenId], Meta(max_length=32)] | None = None
    ignore_eos: bool | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: dict[_TokenId, _Bias | None] | None = None
    stop: _Word | _Words | None = None
    seed: Annotated[int, Meta(ge=-SEEDS, le=SEEDS - 1)] | None = None
    service_tier: Tier | None = None


class _StreamOptions(Struct, kw_only=True):
    include_usage: bool | None = None


class _ChatReasoning(Struct, kw_only=True):
    effort: Effort | None = None
    enabled: bool | None = None


class _ChatThinking(Struct, kw_only=True):
    type: Literal["enabled", "disabled", "auto", "adaptive"]


class Chat(OpenAIBody, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    max_tokens: Count | None = None
    n: Annotated[int, Meta(ge=1, le=MOST_ANSWERS)] | None = None
    stream_options: _StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MOST_LOGPROBS)] | None = None
    modalities: _Word | _Words | None = None
    response_format: Form | None = None
    tools: _Tools | None = None
    tool_choice: _Choice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Json | None = None
    reasoning_effort: Effort | None = None
    enable_thinking: bool | None = None
    """A field of Qwen's servers; chat_template_kwargs override it."""
    thinking: _ChatThinking | None = None
    """A field of the servers of GLM and DeepSeek."""
    reasoning: _ChatReasoning | None = None
    """A field of OpenRouter."""


class Completion(OpenAIBody, kw_only=True):
    prompt: Annotated[Any, Meta(extra_json_schema=_inputs(MOST_COMPLETIONS))]
    suffix: str | None = None
    response_format: Form | None = None
    max_tokens: Count | None = None
    n: Annotated[int, Meta(ge=1, le=MOST_ANSWERS)] | None = None
    stream_options: _StreamOptions | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MOST_LOGPROBS)] | None = None


class Item(Struct, kw_only=True):
    """An item of a conversation in /v1/responses: a message, a call, a result, a thought."""

    type: str | None = None
    role: _Role | None = None
    content: str | list[Json] | None = None


class _Text(Struct, kw_only=True):
    format: Form | None = None


class _Reasoning(Struct, kw_only=True):
    effort: Effort | None = None


class _FlatTool(_Function, kw_only=True):
    type: str
    name: _Name = None


class Response(OpenAIBody, kw_only=True):
    input: str | list[Item] | None = None
    instructions: str | None = None
    max_output_tokens: Count | None = None
    include: _Word | Annotated[list[_Word], Meta(max_length=32)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MOST_LOGPROBS)] | None = None
    text: _Text | None = None
    reasoning: _Reasoning | None = None
    tools: Annotated[list[_FlatTool], Meta(max_length=MOST_TOOLS)] | None = None
    tool_choice: _Choice | None = None
    parallel_tool_calls: bool | None = None


class Embeddings(Struct, kw_only=True):
    input: Annotated[Any, Meta(extra_json_schema=_inputs(MOST_INPUTS))]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = None
    priority: Priority | None = None
    service_tier: Tier | None = None


class Rerank(_Body, kw_only=True):
    """As Cohere's and Jina's interfaces have it."""

    query: _Word
    documents: Annotated[list[_Word | Json], Meta(min_length=1, max_length=MOST_INPUTS)]
    top_n: Count | None = None
    return_documents: bool | None = None
    instruction: str | None = None
    """What makes a document relevant; else that it answers the query."""
    service_tier: Tier | None = None


class _Effort(Struct, kw_only=True):
    effort: Effort | None = None
    format: Form | None = None


class _Turn(Struct, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[MessagePart] | None = None
    output_config: _Effort | None = None


class _NamedTool(Struct, kw_only=True):
    type: str | None = None
    name: _Name = None
    description: _Description = None
    input_schema: _Parameters = None


class _ToolChoice(Struct, kw_only=True):
    type: Literal["auto", "none", "any", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class _Thinking(Struct, kw_only=True):
    type: Literal["enabled", "adaptive", "between_tools", "disabled"]


class CountedMessages(_Body, kw_only=True):
    """The body of Anthropic's count_tokens: a conversation without fields about the answer."""

    messages: Annotated[list[_Turn], Meta(min_length=1)]
    context: _Documents | None = None
    system: str | list[MessagePart] | None = None
    max_tokens: Count | None = None
    temperature: Share | None = None
    top_p: Share | None = None
    top_k: _TopK | None = None
    stop_sequences: _Word | _Words | None = None
    tools: Annotated[list[_NamedTool], Meta(max_length=MOST_TOOLS)] | None = None
    tool_choice: _ToolChoice | None = None
    thinking: _Thinking | None = None
    output_config: _Effort | None = None
    output_format: Form | None = None


class AnthropicMessages(CountedMessages, kw_only=True):
    max_tokens: Count


class OllamaOptions(Struct, kw_only=True):
    num_predict: Annotated[int, Meta(ge=-2, le=MOST)] | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: _TopK | None = None
    min_p: Share | None = None
    repeat_penalty: RepetitionPenalty | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    stop: _Word | _Words | None = None
    seed: Annotated[int, Meta(ge=-1, le=MOST)] | None = None


class OllamaBody(_Body, kw_only=True):
    keep_alive: float | str | None = None
    think: bool | Effort | None = None
    format: Literal["json", ""] | Json | None = None
    options: OllamaOptions | None = None


class OllamaChat(OllamaBody, kw_only=True):
    messages: list[Message] | None = None
    context: _Documents | None = None
    tools: _Tools | None = None


class OllamaGenerate(OllamaBody, kw_only=True):
    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None


class OllamaEmbed(Struct, kw_only=True):
    input: Annotated[Any, Meta(extra_json_schema=_inputs(MOST_INPUTS))]
    truncate: bool | None = None
    dimensions: Count | None = None
    priority: Priority | None = None


class OllamaEmbeddings(Struct, kw_only=True):
    prompt: _Word
    priority: Priority | None = None


def plain_schema(body: type[Struct]) -> Json:
    """The JSON schema of a body, without references and without null as a type."""
    (reference,), parts = msgspec.json.schema_components([body])
    return _plain(reference, parts)


def _plain(schema: Json, parts: Mapping[str, Json]) -> Json:
    """The schema without titles, references and null as a type."""
    if "$ref" in schema:
        return _plain(parts[schema["$ref"].rpartition("/")[2]], parts)
    found = {name: of for name, of in schema.items() if name not in {"title", "default"}}
    if "anyOf" in found:
        held = [_plain(each, parts) for each in found["anyOf"] if each != {"type": "null"}]
        found = held[0] if len(held) == 1 else {**found, "anyOf": held}
    for name in {"items", "additionalProperties"} & found.keys():
        found[name] = _plain(found[name], parts)
    if "properties" in found:
        properties = {name: _plain(of, parts) for name, of in found["properties"].items()}
        found |= {"properties": properties, "required": found["required"]}
    return found
