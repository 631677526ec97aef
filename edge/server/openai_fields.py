"""Reads the sampling fields and messages of OpenAI's dialects into a question."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import partial

from edge.answers.terms import GenerationOptions
from edge.pictures.messages import NOT_SEEN
from edge.server.answers import Question
from edge.server.bodies import (
    MOST_COMPLETIONS,
    SEEDS,
    Chat,
    Completion,
    Form,
    OpenAIBody,
)
from edge.server.efforts import effort_variables, switched
from edge.server.fields import Fields
from edge.server.history import turns
from edge.server.pictures import PICTURE_KINDS, Content, openai_picture, seen_or_said
from edge.server.priorities import priority_of
from edge.server.refusals import Refusal
from edge.server.tools import openai_calls, openai_tools
from edge.text.grammar import JsonSchema
from edge.text.message_texts import TEXT_PARTS

_LEAST_SHARE = 1e-6
_NOT_SENT_BACK = {
    "function_call": "is outdated; give tool_calls",
    "audio": "names an earlier reply, and this server stores none; give its transcript as content",
}
"""Fields of an assistant's message that are refused, and why."""
_SHOWN = ("user", "tool")
"""Roles whose messages may have pictures."""
_NO_TEXT = ("file", "input_file", "input_audio")
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
"""Fields in which -1 means no limit."""
_OUTDATED = ("functions", "function_call")
"""Older names of `tools` and `tool_choice`."""
_OTHER_FORMS = (
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("structured_outputs", "grammar", "json_schema"),
)
"""Fields of other servers for the form of an answer."""
_ELSEWHERE: Mapping[str, tuple[tuple[object, ...], str]] = {
    "bad_words": (([],), "give logit_bias"),
    "n_predict": ((-1,), "give max_tokens"),
    "min_new_tokens": ((0,), "give min_tokens"),
    "think": ((), "give reasoning_effort"),
    "include_stop_str_in_output": ((False,), ""),
    "prompt_logprobs": ((0,), ""),
    "truncate_prompt_tokens": ((), ""),
    "skip_special_tokens": ((True,), ""),
    "add_generation_prompt": ((True,), ""),
    "chat_template": ((), ""),
    "documents": (([],), ""),
    "lora_request": (({},), ""),
    "use_beam_search": ((False,), ""),
    "length_penalty": ((1,), ""),
    "typical_p": ((0, 1), ""),
    "tfs_z": ((1,), ""),
    "top_a": ((0,), ""),
    "mirostat": ((0,), ""),
    "dry_multiplier": ((0,), ""),
    "xtc_probability": ((0,), ""),
    "guidance_scale": ((1,), ""),
}
"""Fields of other servers that change an answer: their values without effect, and the name of the
same field here."""
_NOT_RUN = {"web_search_options": "searches nothing", "moderation": "judges nothing"}
"""Services of OpenAI beside an answer, and the reason why this server refuses each."""


_PLAIN_OPTIONS = (
    {each.name for each in fields(GenerationOptions)}.intersection(OpenAIBody.__struct_fields__)
) - {
    *("top_p", "top_k", "logit_bias", "stop", "seed", "priority"),
    *("repetition_penalty", "ignore_eos", "stop_token_ids", "context"),
}
"""Fields that mean the same in a body and in options."""


def options_of(
    body: Fields,
    asked: OpenAIBody,
    *,
    most_new_tokens: int | None,
    logprobs: int | None,
    json_schema: JsonSchema | None = None,
) -> GenerationOptions:
    """Options from the fields that every dialect of OpenAI has."""
    for name in _OUTDATED:
        if body.raw(name):
            raise body.refuse(name, "is outdated; give tools")
    for name in _OTHER_FORMS:
        if body.raw(name):
            raise body.refuse(name, "is not supported by this server; give response_format")
    refuse_elsewhere(body)
    for name, instead in _NOT_RUN.items():
        if body.raw(name) is not None:
            raise body.refuse(name, f"is not supported: this server {instead}; leave it out")
    biases = asked.logit_bias
    return GenerationOptions(
        **{name: getattr(asked, name) for name in _PLAIN_OPTIONS},
        repetition_penalty=asked.repetition_penalty or asked.repeat_penalty,
        ignore_eos=asked.ignore_eos is True,
        stop_token_ids=asked.stop_token_ids or (),
        context=asked.context or (),
        max_new_tokens=most_new_tokens,
        top_p=share_of(asked.top_p),
        top_k=count_of(asked.top_k),
        logit_bias=None if biases is None else {id: bias or 0.0 for id, bias in biases.items()},
        stop=asked.stop or (),
        seed=None if asked.seed is None else asked.seed % SEEDS,
        logprobs=logprobs,
        json_schema=json_schema,
        priority=priority_of(asked.priority, asked.service_tier),
    )


def refuse_elsewhere(body: Fields) -> None:
    """Raises Refusal for a field of other servers that would change the answer."""
    for name, (neutral, instead) in _ELSEWHERE.items():
        value = body.raw(name)
        if value is not None and value not in neutral:
            raise body.refuse(name, f"is not supported by this server; {instead or 'leave it out'}")


def share_of(share: float | None) -> float | None:
    """The value of top_p for the options; 0 means the likeliest token only."""
    return None if share is None else max(share, _LEAST_SHARE)


def count_of(count: int | None) -> int | None:
    """The value of top_k for the options; -1 means all tokens."""
    return None if count is None else max(count, 0)


def schema_of(form: Form | None, where: str, *, flat: bool = False) -> JsonSchema | None:
    """The schema of an answer that response_format asks for, or with `flat` text.format."""
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return "object" if form.schema is None else form.schema
    held = form if flat else form.json_schema
    if held is None or held.schema is None:
        place = f"{where}.schema" if flat else f"{where}.json_schema.schema"
        raise Refusal(400, f"{place} is missing", param=place)
    return held.schema


def chat_question(body: Fields) -> Question:
    """The question in the fields of /v1/chat/completions."""
    body = body.unlimited(*LIMITS)
    asked = body.shaped(Chat)
    logprobs = None
    if asked.logprobs:
        logprobs = asked.top_logprobs or 0
    elif asked.top_logprobs is not None:
        raise body.refuse("top_logprobs", "needs logprobs: true")
    if asked.modalities not in (None, "text") and set(asked.modalities) - {"text"}:
        raise body.refuse("modalities", "has more than text; this server answers in text only")
    offer = openai_tools(body)
    return Question(
        messages=turns([message_of(each) for each in body.objects("messages")]),
        options=options_of(
            body,
            asked,
            most_new_tokens=asked.max_completion_tokens or asked.max_tokens,
            logprobs=logprobs,
            json_schema=schema_of(asked.response_format, "response_format"),
        ),
        answers=asked.n or 1,
        tools=offer.tools,
        forced=offer.forced,
        several_calls=offer.several,
        cache_salt=asked.cache_salt or "",
        variables={
            **effort_variables(asked.reasoning_effort),
            **_thinking_variables(asked),
            **(asked.chat_template_kwargs or {}),
        },
    )


def _thinking_variables(asked: Chat) -> dict[str, object]:
    """Variables for `reasoning`, `thinking` and `enable_thinking`, as other servers have them."""
    found: dict[str, object] = {}
    if asked.reasoning is not None:
        found |= effort_variables(asked.reasoning.effort)
        if asked.reasoning.enabled is not None:
            found |= switched(asked.reasoning.enabled)
    if asked.thinking is not None and asked.thinking.type in ("enabled", "disabled"):
        found |= switched(asked.thinking.type == "enabled")
    if asked.enable_thinking is not None:
        found |= switched(asked.enable_thinking)
    return found


def completion_question(body: Fields) -> Question:
    """The question in the fields of /v1/completions: a text or token ids, or a list of either."""
    limited = body.raw("max_tokens") != -1
    body = body.unlimited(*LIMITS)
    asked = body.shaped(Completion)
    prompts = asked.prompt
    if not isinstance(prompts, list) or all(type(each) is int for each in prompts):
        prompts = [prompts]
    if not all(map(_is_prompt, prompts)):
        raise body.refuse("prompt", "must be a text or token ids, or a list of them, none empty")
    answers = asked.n or 1
    if len(prompts) * answers > MOST_COMPLETIONS:
        raise body.refuse("prompt", f"and n ask for more than {MOST_COMPLETIONS} answers")
    for name, nothing in (("echo", False), ("best_of", 1)):
        value = body.raw(name)
        if value is not None and (type(value) is not type(nothing) or value != nothing):
            raise body.refuse(name, "is not supported by this server; leave it out")
    return Question(
        prompts=prompts,
        suffix=asked.suffix or "",
        options=options_of(
            body,
            asked,
            most_new_tokens=asked.max_tokens or 16 if limited else None,
            logprobs=asked.logprobs,
            json_schema=schema_of(asked.response_format, "response_format"),
        ),
        answers=answers,
        cache_salt=asked.cache_salt or "",
    )


def _is_prompt(value: object) -> bool:
    """A text or token ids, not empty."""
    if isinstance(value, list):
        return bool(value) and all(type(each) is int for each in value)
    return isinstance(value, str) and value != ""


def message_of(message: Fields) -> Mapping[str, object]:
    """A message for the template, with its roles, and with parts of text joined if there is no
    picture between them."""
    role = message.need_text("role")
    said: Content = content_of(message) if role not in _SHOWN else seen_content(message)
    if role == "assistant":
        said = said or message.text("refusal") or ""
    found: dict[str, object] = {
        "role": "system" if role == "developer" else role,
        "content": said,
    }
    if role == "assistant":
        for name, instead in _NOT_SENT_BACK.items():
            if message.raw(name) is not None:
                raise message.refuse(name, instead)
        if (thought := _thought(message)) is not None:
            found["reasoning_content"] = thought
        if calls := openai_calls(message):
            found["tool_calls"] = calls
    if role == "tool":
        tool_name = message.text("name") or message.text("tool_name")
        found |= {} if tool_name is None else {"name": tool_name}
        if "tool_call_id" in message:
            found["tool_call_id"] = message.need_text("tool_call_id")
    return found


def _thought(message: Fields) -> str | None:
    """The thoughts of a message, under any of the names that servers give them."""
    texts = (message.text(name) for name in ("reasoning_content", "reasoning", "thinking"))
    return next((text for text in texts if text), None)


def content_of(message: Fields, name: str = "content", *, of_tool: bool = False) -> str:
    """The text of a message: a text, or its parts joined. of_tool: see `seen_content`."""
    content = message.raw(name)
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(_text_of(part, of_tool) for part in message.objects(name))


def seen_content(message: Fields, name: str = "content", *, of_tool: bool | None = None) -> Content:
    """The content of a user's message or of a tool's result: a text, or parts if there is a
    picture.

    of_tool: it is a tool's result; None: as its role says. What cannot be read of one is not
    refused, because an agent would stop; the model is told that it cannot see it.
    """
    of_tool = message.raw("role") == "tool" if of_tool is None else of_tool
    parts = message.objects(name) if isinstance(message.raw(name), list) else []
    if not any(part.raw("type") in PICTURE_KINDS for part in parts):
        return content_of(message, name, of_tool=of_tool)
    read = partial(seen_or_said, read=openai_picture) if of_tool else openai_picture
    return [
        read(part)
        if part.raw("type") in PICTURE_KINDS
        else {"type": "text", "text": _text_of(part, of_tool)}
        for part in parts
    ]


def _text_of(part: Fields, of_tool: bool) -> str:
    kind = part.need_text("type")
    if kind in TEXT_PARTS:
        return part.text("text") or ""
    if kind == "refusal":
        return part.text("refusal") or ""
    if of_tool and kind in _NO_TEXT:
        return NOT_SEEN
    raise part.refuse("type", f"is {kind!r:.40}; only text and a user's images are read")


def wants_usage(body: Fields) -> bool:
    options = body.object("stream_options")
    return options is not None and options.flag("include_usage")
