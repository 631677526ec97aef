"""Every field, message, item, part, tool and choice that the official clients know by their types:
whether it is read, passed over, or refused by name. A new version of a client that knows more fails
here until it is decided what becomes of it; an older one knows less."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
import typing_extensions

from edge.server import anthropic_messages, openai_fields, openai_responses
from edge.server.answers import Question
from edge.server.fields import Fields
from edge.server.refusals import Refusal

KNOWN: Mapping[str, Any] = {
    "arguments": "{}",
    "include": ["message.output_text.logprobs"],
    "input_schema": {"type": "object"},
    "schema": {"type": "object"},
    "parallel_tool_calls": False,
    "call_id": "x",
    "data": "eA==",
}
"""What no type says: of which form a text is, or what an object must have; and what changes."""

ALWAYS = (
    *("type", "call_id", "text", "reasoning", "content", "effort", "schema", "tabs"),
    "image_url",
)
"""Fields that no type needs, and that say something."""


def kinds(union: Any) -> Iterator[Any]:
    """What a union is made of, and what the unions in it are made of."""
    union = getattr(union, "__value__", union)
    origin = get_origin(union)
    if origin in {Annotated, typing_extensions.Required, typing_extensions.NotRequired}:
        yield from kinds(get_args(union)[0])
    elif origin in {Union, types.UnionType}:
        for each in get_args(union):
            yield from kinds(each)
    elif union is not type(None) and not hasattr(union, "model_fields"):  # that are of replies
        yield union


def hints_of(kind: Any) -> Mapping[str, Any]:
    return get_type_hints(kind, include_extras=True)


def example(of: Any, name: str = "", *, is_whole: bool = False) -> Any:
    """The least that is of this type, in the field of this name; is_whole: with all that it may
    have."""
    kind = next(kinds(of))
    origin = get_origin(kind) or kind
    if name in KNOWN:
        return KNOWN[name]
    if origin is Literal:
        return get_args(kind)[-1]
    if typing_extensions.is_typeddict(kind):
        return {
            each: example(hint, each)
            for each, hint in hints_of(kind).items()
            if is_whole or get_origin(hint) is typing_extensions.Required or each in ALWAYS
        }
    if origin is str or not isinstance(origin, type):
        return "https://x.example/x" if name.endswith("url") else "x"
    if issubclass(origin, Mapping):
        return {}
    if issubclass(origin, Iterable):
        return [example(each) for each in get_args(kind)[:1]] or ["x"]
    return {bool: True, int: 2, float: 0.5}.get(origin, "x")


def name_of(kind: Any) -> str:
    """What says in JSON which it is: its type or its role, or else the word itself."""
    if not typing_extensions.is_typeddict(kind):
        return "word"
    hints = hints_of(kind)
    words = next(kinds(hints.get("type", hints.get("role"))))
    return str(get_args(words)[0])


Json = dict[str, Any]
Fate = Literal["read", "passed over", "refused", "refused without a name"]
Ask = Callable[[Fields], Question]


def fate(ask: Ask, plain: Json, changed: Json) -> Fate:
    try:
        question = replace(ask(Fields(changed)), told_back={})
    except Refusal as refusal:
        return "refused" if refusal.param is not None else "refused without a name"
    same = question == replace(ask(Fields(plain)), told_back={})
    return "passed over" if same else "read"


HELLO = {"role": "user", "content": "Hello"}
SAID = {"role": "assistant", "content": "Well."}
LOOK = {"type": "function", "function": {"name": "look"}}
FLAT_LOOK = {"type": "function", "name": "look"}
CHAT: Json = {"messages": [HELLO], "tools": [LOOK]}
RESPONSES: Json = {"input": [HELLO, SAID], "tools": [FLAT_LOOK]}
ANTHROPIC: Json = {
    "max_tokens": 1,
    "messages": [HELLO],
    "tools": [
        {"name": "x", "description": "It.", "input_schema": {"type": "object"}},
        {"name": "look", "input_schema": {"type": "object"}},
    ],
}
WITH: Mapping[str, Json] = {
    "top_logprobs": {"logprobs": True, "include": ["message.output_text.logprobs"]}
}
"""Without which a field says nothing."""

Bodies = Iterable[tuple[str, Json]]


def fields(of: Any, plain: Json) -> Bodies:
    for name, hint in hints_of(of).items():
        yield name, {**plain, **WITH.get(name, {}), name: example(hint, name, is_whole=True)}


def each(union: Any, body: Callable[[Any], Json]) -> Bodies:
    return [(name_of(kind), body(example(kind))) for kind in kinds(union)]


def said(plain: Json, *messages: Json) -> Json:
    return {**plain, "messages": [HELLO, *messages]}


def chosen(plain: Json, choice: Any, tool: Json) -> Json:
    """Of the tool `x`, as the examples call it."""
    if isinstance(choice, dict) and choice["type"] == "allowed_tools":
        choice.get("allowed_tools", choice)["tools"] = [tool]
    return {**plain, "tools": [tool], "tool_choice": choice}


def of_chat() -> Mapping[str, Bodies]:
    from openai.types import chat
    from openai.types.chat import completion_create_params as params

    def parts(role: str) -> Bodies:
        return each(
            chat.ChatCompletionContentPartParam,
            lambda part: said(CHAT, {"role": role, "content": [part]}),
        )

    return {
        "fields": fields(params.CompletionCreateParamsNonStreaming, CHAT),
        "messages": each(chat.ChatCompletionMessageParam, lambda each: said(CHAT, each)),
        "parts": parts("user"),
        "parts of results": parts("tool"),
        "calls": each(
            chat.ChatCompletionMessageToolCallUnionParam,
            lambda call: said(CHAT, {"role": "assistant", "tool_calls": [call]}),
        ),
        "tools": each(
            chat.ChatCompletionToolUnionParam, lambda tool: {**CHAT, "tools": [LOOK, tool]}
        ),
        "choices": each(
            chat.ChatCompletionToolChoiceOptionParam,
            lambda choice: chosen(CHAT, choice, {"type": "function", "function": {"name": "x"}}),
        ),
        "forms": each(params.ResponseFormat, lambda form: {**CHAT, "response_format": form}),
    }


def of_responses() -> Mapping[str, Bodies]:
    from openai.types import responses
    from openai.types.responses import response_create_params as params
    from openai.types.responses.response_function_call_output_item_param import (
        ResponseFunctionCallOutputItemParam,
    )
    from openai.types.responses.response_input_content_param import ResponseInputContentParam
    from openai.types.responses.response_output_message_param import Content

    def items(*items: Json) -> Json:
        return {**RESPONSES, "input": [HELLO, *items, SAID]}

    return {
        "fields": fields(params.ResponseCreateParamsNonStreaming, RESPONSES),
        "items": each(responses.ResponseInputItemParam, items),
        "parts": each(
            ResponseInputContentParam, lambda part: items({"role": "user", "content": [part]})
        ),
        "parts of answers": each(
            Content, lambda part: items({"role": "assistant", "content": [part]})
        ),
        "parts of results": each(
            ResponseFunctionCallOutputItemParam,
            lambda part: items({"type": "function_call_output", "call_id": "x", "output": [part]}),
        ),
        "tools": each(responses.ToolParam, lambda tool: {**RESPONSES, "tools": [FLAT_LOOK, tool]}),
        "choices": each(
            params.ToolChoice,
            lambda choice: chosen(RESPONSES, choice, {"type": "function", "name": "x"}),
        ),
        "forms": each(
            responses.ResponseFormatTextConfigParam,
            lambda form: {**RESPONSES, "text": {"format": form}},
        ),
    }


def of_anthropic() -> Mapping[str, Bodies]:
    """With all that is in its beta."""
    from anthropic.types import beta, message_create_params
    from anthropic.types.beta import (
        beta_request_document_block_param,
        beta_request_tool_addition_block_param,
        beta_system_message_param,
        beta_tool_result_block_param,
    )
    from anthropic.types.beta import (
        message_create_params as beta_params,
    )

    def block(role: str) -> Callable[[Json], Json]:
        return lambda part: said(ANTHROPIC, {"role": role, "content": [part]})

    def result(part: Json) -> Json:
        return block("user")({"type": "tool_result", "tool_use_id": "x", "content": [part]})

    def changing(part: Json) -> Json:
        gone = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "x"}}
        return said(ANTHROPIC, {"role": "system", "content": [gone, part]})

    return {
        "fields": [
            *fields(beta_params.MessageCreateParamsNonStreaming, ANTHROPIC),
            *fields(message_create_params.MessageCreateParamsNonStreaming, ANTHROPIC),
        ],
        "messages": each(beta.BetaMessageParam, lambda each: said(ANTHROPIC, each)),
        "blocks": each(beta.BetaContentBlockParam, block("user")),
        "blocks of the system": each(beta_system_message_param.ContentBlock, changing),
        "blocks of results": each(beta_tool_result_block_param.Content, result),
        "documents": each(
            beta_request_document_block_param.Source,
            lambda source: block("user")({"type": "document", "source": source}),
        ),
        "tools": each(
            beta.BetaToolUnionParam,
            lambda tool: {**ANTHROPIC, "tools": [*ANTHROPIC["tools"], tool]},
        ),
        "choices": each(
            beta.BetaToolChoiceParam,
            lambda choice: {**ANTHROPIC, "tool_choice": choice},
        ),
        "thinking": each(beta.BetaThinkingConfigParam, lambda how: {**ANTHROPIC, "thinking": how}),
        "changed tools": each(
            beta_request_tool_addition_block_param.Tool,
            lambda tool: block("system")({"type": "tool_removal", "tool": tool}),
        ),
    }


DIALECTS: Mapping[str, tuple[Ask, Json, Callable[[], Mapping[str, Bodies]]]] = {
    "chat": (openai_fields.chat_question, CHAT, of_chat),
    "responses": (openai_responses.question_of, RESPONSES, of_responses),
    "anthropic": (anthropic_messages.question_of, ANTHROPIC, of_anthropic),
}

FATES: Mapping[str, Mapping[str, Mapping[Fate, str]]] = {
    "chat": {
        "fields": {
            "read": "frequency_penalty logit_bias logprobs max_completion_tokens max_tokens "
            "messages n parallel_tool_calls presence_penalty reasoning_effort seed "
            "service_tier stop temperature tool_choice tools top_logprobs top_p",
            "passed over": "audio metadata model prediction prompt_cache_key prompt_cache_options "
            "prompt_cache_retention response_format safety_identifier store stream "
            "stream_options user verbosity",
            "refused": "function_call functions modalities moderation web_search_options",
        },
        "messages": {
            "read": "assistant developer system tool user",
            "refused": "function",
        },
        "parts": {
            "read": "image_url text",
            "refused": "file input_audio",
        },
        "parts of results": {
            "read": "file image_url input_audio text",
        },
        "calls": {
            "read": "custom function",
        },
        "tools": {
            "read": "custom function",
        },
        "choices": {
            "read": "allowed_tools custom function word",
        },
        "forms": {
            "read": "json_object json_schema",
            "passed over": "text",
        },
    },
    "responses": {
        "fields": {
            "read": "include input instructions max_output_tokens parallel_tool_calls "
            "reasoning service_tier temperature tool_choice tools top_logprobs "
            "top_p",
            "passed over": "access_programs background_options context_management image "
            "max_tool_calls metadata model prompt_cache_key prompt_cache_options "
            "prompt_cache_retention safety_identifier store stream stream_options "
            "text truncation user",
            "refused": "background conversation moderation previous_response_id prompt",
        },
        "items": {
            "read": "additional_tools apply_patch_call apply_patch_call_output "
            "configuration_update custom_tool_call custom_tool_call_output "
            "function_call function_call_output local_shell_call "
            "local_shell_call_output mcp_call message reasoning shell_call "
            "shell_call_output tool_search_output",
            "passed over": "code_interpreter_call computer_call computer_call_output "
            "file_search_call image_generation_call mcp_approval_request "
            "mcp_approval_response mcp_list_tools program program_output "
            "tool_search_call web_search_call",
            "refused": "compaction compaction_trigger item_reference",
        },
        "parts": {
            "read": "input_image input_text",
            "refused": "input_file",
        },
        "parts of answers": {
            "read": "output_text refusal",
        },
        "parts of results": {
            "read": "input_file input_image input_text",
        },
        "tools": {
            "read": "custom function namespace",
            "passed over": "apply_patch code_interpreter computer computer_use_preview file_search "
            "image_generation local_shell mcp programmatic_tool_calling shell "
            "tool_search web_search web_search_preview",
        },
        "choices": {
            "read": "allowed_tools custom function word",
            "refused": "apply_patch file_search mcp programmatic_tool_calling shell",
        },
        "forms": {
            "read": "json_object json_schema",
            "passed over": "text",
        },
    },
    "anthropic": {
        "fields": {
            "read": "max_tokens messages output_config stop_sequences system thinking "
            "tool_choice tools",
            "passed over": "betas billing_policy cache_control context_management diagnostics "
            "fallback_credit_token fallbacks inference_geo metadata model "
            "service_tier speed stream user_profile_id workspace_id",
            "refused": "compaction container mcp_servers thread",
        },
        "messages": {
            "read": "assistant system user",
        },
        "blocks": {
            "read": "compaction image search_result text thinking tool_removal tool_result "
            "tool_use",
            "passed over": "advisor_tool_result bash_code_execution_tool_result "
            "code_execution_tool_result fallback mcp_tool_listing mcp_tool_result "
            "mcp_tool_use redacted_thinking server_tool_use "
            "text_editor_code_execution_tool_result tool_addition "
            "tool_search_tool_result web_fetch_tool_result web_search_tool_result",
            "refused": "container_upload document",
        },
        "blocks of the system": {
            "read": "text tool_addition tool_removal",
        },
        "blocks of results": {
            "read": "browser_state document image search_result text tool_reference",
        },
        "documents": {
            "read": "content text",
            "refused": "base64 file url",
        },
        "tools": {
            "read": "bash_20241022 bash_20250124 custom memory_20250818 "
            "text_editor_20241022 text_editor_20250124 text_editor_20250429 "
            "text_editor_20250728",
            "passed over": "advisor_20260301 browser_toolset_20260801 code_execution_20250522 "
            "code_execution_20250825 code_execution_20260120 "
            "code_execution_20260521 computer_20241022 computer_20250124 "
            "computer_20251124 computer_toolset_20260801 mcp_toolset "
            "tool_search_tool_bm25_20251119 tool_search_tool_regex_20251119 "
            "web_fetch_20250910 web_fetch_20260209 web_fetch_20260309 "
            "web_fetch_20260318 web_search_20250305 web_search_20260209 "
            "web_search_20260318",
        },
        "choices": {
            "read": "any none tool",
            "passed over": "auto",
        },
        "thinking": {
            "read": "adaptive between_tools enabled",
            "passed over": "disabled",
        },
        "changed tools": {
            "read": "tool_definition tool_reference",
            "passed over": "mcp_tool_reference mcp_toolset_reference",
        },
    },
}
"""`model` and what is said of streams, the routes read."""


@pytest.mark.parametrize("dialect", DIALECTS)
def test_what_becomes_of_each_kind_is_decided(dialect: str) -> None:
    ask, plain, of = DIALECTS[dialect]
    for where, bodies in of().items():
        found = {(name, fate(ask, plain, body)) for name, body in bodies}
        known = {
            (name, how) for how, names in FATES[dialect][where].items() for name in names.split()
        }
        assert found
        assert found <= known, f"{where}: {sorted(found - known)}"


def worded(of: Any, name: str) -> Iterator[Any]:
    """The field with each word that may stand in it, or in what it holds."""
    for kind in kinds(of):
        if get_origin(kind) is Literal:
            yield from get_args(kind)
        elif typing_extensions.is_typeddict(kind):
            for inner, hint in hints_of(kind).items():
                for word in worded(hint, inner):
                    yield {**example(kind, name), inner: word}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_word_of_a_field_is_known(dialect: str) -> None:
    """Efforts, tiers and the like."""
    from anthropic.types.beta import message_create_params as of_anthropic
    from openai.types.chat import completion_create_params as of_chat
    from openai.types.responses import response_create_params as of_responses

    params = {
        "chat": of_chat.CompletionCreateParamsNonStreaming,
        "responses": of_responses.ResponseCreateParamsNonStreaming,
        "anthropic": of_anthropic.MessageCreateParamsNonStreaming,
    }[dialect]
    ask, plain, _of = DIALECTS[dialect]
    refused = FATES[dialect]["fields"]["refused"].split()
    tried = 0
    for name, hint in hints_of(params).items():
        if name in refused or name in {"tool_choice", "response_format"}:
            continue  # which have kinds of their own
        for word in worded(hint, name):
            assert fate(ask, plain, {**plain, name: word}) != "refused", (name, word)
            tried += 1
    assert tried > 10
