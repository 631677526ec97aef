"""What OpenAI's dialects say of sampling and messages, made into a question."""

from __future__ import annotations

from collections.abc import Mapping

from edge.answers.terms import GenerationOptions
from edge.server.answers import Question
from edge.server.efforts import effort_variables
from edge.server.fields import Fields
from edge.server.history import NOT_SEEN, turns
from edge.server.priorities import priority_or_tier_of
from edge.server.tools import openai_calls, openai_tools
from edge.text.grammar import JsonSchema
from edge.text.message_texts import TEXT_PARTS

MOST_STOPS = 16
MOST_ANSWERS = 16
MOST_LOGPROBS = 20
MOST_COMPLETIONS = 128
"""To all prompts of one request."""

_TOKEN_DIGITS = 9
SEEDS = 1 << 63
"""From minus that many on, as OpenAI has them. Who asks for several answers has the next ones, too;
they must be below 2^64."""
_LEAST_SHARE = 1e-6
_NOT_SENT_BACK = {
    "function_call": "is outdated; give tool_calls",
    "audio": "names what is not here: this server stores nothing; give its transcript as content",
}
"""Fields of an assistant's message that are refused, and why."""
_ROLES = ("system", "developer", "user", "assistant", "tool")
_NO_TEXT = ("image_url", "input_image", "file", "input_file", "input_audio")
_OUTDATED = ("functions", "function_call")
"""What `tools` were before."""
_OTHER_FORMS = (
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("structured_outputs", "grammar"),
)
"""Names by which other servers take the form of an answer."""
_NOT_RUN = {"web_search_options": "searches nothing", "moderation": "judges nothing"}
"""What OpenAI does in addition to an answer, and what this server does instead."""


def options_of(
    body: Fields,
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
            raise body.refuse(name, "is not supported by this server; give a JSON schema")
    for name, instead in _NOT_RUN.items():
        if body.raw(name) is not None:
            raise body.refuse(name, f"is not supported: this server {instead}; leave it out")
    seed = body.whole("seed", least=-SEEDS, most=SEEDS - 1)
    return GenerationOptions(
        max_new_tokens=most_new_tokens,
        temperature=body.number("temperature", least=0, most=2),
        top_p=share_of(body),
        top_k=body.whole("top_k", least=0),
        min_p=body.number("min_p", least=0, most=1),
        repetition_penalty=body.number("repetition_penalty", least=0.01, most=100),
        frequency_penalty=body.number("frequency_penalty", least=-2, most=2),
        presence_penalty=body.number("presence_penalty", least=-2, most=2),
        logit_bias=_biases(body),
        stop=body.texts("stop", most=MOST_STOPS),
        seed=None if seed is None else seed % SEEDS,
        logprobs=logprobs,
        json_schema=json_schema,
        priority=priority_or_tier_of(body),
    )


def share_of(body: Fields) -> float | None:
    """The value of top_p, where 0 is as much as the likeliest token."""
    share = body.number("top_p", least=0, most=1)
    return None if share is None else max(share, _LEAST_SHARE)


def schema_of(form: Fields | None, *, flat: bool = False) -> JsonSchema | None:
    """What response_format, or with `flat` text.format, says that an answer must be, if
    anything."""
    if form is None:
        return None
    kind = form.one_of("type", ("text", "json_object", "json_schema"))
    if kind != "json_schema":
        return None if kind == "text" else "object"
    held = form if flat else form.object("json_schema")
    schema = None if held is None else held.object("schema")
    if schema is None:
        raise form.refuse("schema" if flat else "json_schema.schema", "is missing")
    return dict(schema.items())


def chat_question(body: Fields) -> Question:
    """The question in the fields of /v1/chat/completions."""
    longest = body.whole("max_completion_tokens", least=1)
    if longest is None:
        longest = body.whole("max_tokens", least=1)
    logprobs = None
    if body.flag("logprobs"):
        logprobs = body.whole("top_logprobs", least=0, most=MOST_LOGPROBS) or 0
    elif "top_logprobs" in body:
        raise body.refuse("top_logprobs", "needs logprobs: true")
    if set(body.texts("modalities", most=MOST_STOPS)) - {"text"}:
        raise body.refuse("modalities", "has more than text; this server says nothing else")
    schema = schema_of(body.object("response_format"))
    messages = turns([message_of(each) for each in body.objects("messages")])
    if not messages:
        raise body.refuse("messages", "must have at least one message")
    extra = body.object("chat_template_kwargs")
    offer = openai_tools(body)
    return Question(
        messages=messages,
        options=options_of(body, most_new_tokens=longest, logprobs=logprobs, json_schema=schema),
        answers=body.whole("n", least=1, most=MOST_ANSWERS) or 1,
        tools=offer.tools,
        forced=offer.forced,
        several_calls=offer.several,
        cache_salt=body.text("cache_salt") or "",
        variables={
            **effort_variables(body, "reasoning_effort"),
            **({} if extra is None else dict(extra.items())),
        },
    )


def completion_question(body: Fields) -> Question:
    """The question in the fields of /v1/completions: a text or token ids, or a list of either."""
    prompts = body.raw("prompt")
    if not isinstance(prompts, list) or all(type(each) is int for each in prompts):
        prompts = [prompts]
    if not all(map(_is_prompt, prompts)):
        raise body.refuse("prompt", "must be a text or token ids, or a list of them, none empty")
    answers = body.whole("n", least=1, most=MOST_ANSWERS) or 1
    if len(prompts) * answers > MOST_COMPLETIONS:
        raise body.refuse("prompt", f"and n ask for more than {MOST_COMPLETIONS} answers")
    for name, nothing in (("echo", False), ("best_of", 1)):
        value = body.raw(name)
        if value is not None and (type(value) is not type(nothing) or value != nothing):
            raise body.refuse(name, "is not supported by this server; leave it out")
    longest = body.whole("max_tokens", least=1)
    return Question(
        prompts=prompts,
        suffix=body.text("suffix") or "",
        options=options_of(
            body,
            most_new_tokens=16 if longest is None else longest,
            logprobs=body.whole("logprobs", least=0, most=MOST_LOGPROBS),
            json_schema=schema_of(body.object("response_format")),
        ),
        answers=answers,
        cache_salt=body.text("cache_salt") or "",
    )


def _is_prompt(value: object) -> bool:
    """A text or token ids, not empty."""
    if isinstance(value, list):
        return bool(value) and all(type(each) is int for each in value)
    return isinstance(value, str) and value != ""


def message_of(message: Fields) -> Mapping[str, object]:
    """For the template: roles as it knows them, parts of text joined."""
    role = message.one_of("role", _ROLES)
    said = content_of(message, of_tool=role == "tool")
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
    """What a message was thought out with; clients call it as their servers do."""
    texts = (message.text(name) for name in ("reasoning_content", "reasoning", "thinking"))
    return next((text for text in texts if text), None)


def content_of(message: Fields, name: str = "content", *, of_tool: bool = False) -> str:
    """The text of a message: itself, or the parts of it.

    of_tool: what a tool brings is not what the user asks, and an agent that looked at a picture
    goes on: the model is told that it cannot see it."""
    content = message.raw(name)
    if content is None or isinstance(content, str):
        return content or ""
    parts = []
    for part in message.objects(name):
        kind = part.need_text("type")
        if kind in TEXT_PARTS:
            parts.append(part.text("text") or "")
        elif kind == "refusal":
            parts.append(part.text("refusal") or "")
        elif of_tool and kind in _NO_TEXT:
            parts.append(NOT_SEEN)
        else:
            raise part.refuse("type", f"is {kind!r:.40}; only text is read")
    return "".join(parts)


def wants_usage(body: Fields) -> bool:
    options = body.object("stream_options")
    return options is not None and options.flag("include_usage")


def _biases(body: Fields) -> Mapping[int, float] | None:
    biases = body.object("logit_bias")
    if biases is None:
        return None
    found = {}
    for name, _value in biases.items():
        if not name.isdecimal() or len(name) > _TOKEN_DIGITS:
            raise biases.refuse(name, "is not the id of a token")
        found[int(name)] = biases.number(name, least=-100, most=100) or 0.0
    return found
