"""The models' formats of tool calls: how each is recognised, parsed and forced by a grammar. Pure.

    <tool_call>{"name": …, "arguments": …}</tool_call>                  Hermes, Qwen 3 and others
    <tool_call><function=name><parameter=key>…</parameter></function></tool_call>     Qwen 3.5
    <tool_call>name<arg_key>key</arg_key><arg_value>…</arg_value></tool_call>         GLM 4.5
    <|tool_call_start|>[name(key=…)]<|tool_call_end|>                   LFM2
    <function_calls>name(key=…) and more lines</function_calls>         Olmo 3
    <|START_ACTION|>[{"tool_name": …, "parameters": …}]<|END_ACTION|>   Command R7B and A
    <|tool_call>call:name{key:…}<tool_call|>                            Gemma 4
    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜>… DeepSeek
    <|channel|>commentary to=functions.name <|constrain|>json<|message|>{…}   gpt-oss
    [TOOL_CALLS][{"name": …, "arguments": …}, …]                        Mistral
    [TOOL_CALLS]name[ARGS]{…}                                           Mistral since 2025
    {"name": …, "parameters": …}; …                                     Llama 3: all of the answer
    name, and in the next line {…}                                      GLM 4: all of the answer

Each entry of the table has the reader of its format, and the shape for forced calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from edge.text.answer_parts import ToolCall
from edge.text.bare_calls import bare_json, bare_line
from edge.text.channels import CHANNEL, CONSTRAIN, END, MESSAGE, START
from edge.text.lenient_values import gemma_call, python_calls, python_lines
from edge.text.tool_call_bodies import (
    Body,
    ChosenBody,
    ClosedBody,
    JsonBody,
    MarkedBody,
    Parse,
    json_calls,
)
from edge.text.tool_call_grammars import ArgumentShape, CallShape, json_shape
from edge.text.tool_types import ToolTypes, typed

Bare = Callable[[ToolTypes, str], "tuple[Body, int] | str | None"]
"""Selects a reader by the beginning of an answer; see ChosenBody."""

Begin = Callable[[ToolTypes], Body]
"""Makes the reader of the text behind a mark."""

_SPACE = re.compile(r"\s*")

_TOOL_CLOSE = "</tool_call>"
_TOOL_END = re.compile(re.escape(_TOOL_CLOSE))

_FUNCTION_OPEN, _FUNCTION_CLOSE = "<function=", "</function>"
_FUNCTION = re.compile(r"<function=([^>\n]{1,256})>")
_FUNCTION_END = re.compile(r"(?P<own></function>)\s{0,16}</tool_call>")
_LONE_FUNCTION_END = re.compile(r">\s{0,16}(?P<own></function>)")
_PARAMETER = re.compile(r"<parameter=([^>\n]{1,256})>")
_PARAMETER_END = re.compile(r"</parameter>(?=\s{0,16}(?:<parameter=|\Z))")

_NAMED = re.compile(r"([^\s<>{}\[\]]{1,128})\s{0,8}(<arg_key>|</tool_call>)")
_NAMED_SO_FAR = re.compile(r"[^\s<>{}\[\]]{1,128}\s{0,8}(?:<[a-z_/]{0,10})?")
_ARGUMENT = re.compile(r"<arg_key>([^<]{1,256})</arg_key>\s{0,16}<arg_value>")
_ARGUMENT_END = re.compile(r"</arg_value>(?=\s{0,16}(?:<arg_key>|\Z))")
_LAST_ARGUMENT_END = re.compile(r"(?P<own></arg_value>)\s{0,16}</tool_call>")

_LIST_END = re.compile(re.escape("<|tool_call_end|>"))
_GEMMA_END = re.compile(re.escape("<tool_call|>"))

_SEEK_BEGIN, _SEEK_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_SEEK_BETWEEN = "<｜tool▁sep｜>"
_SEEK_ALL_END = re.compile(re.escape("<｜tool▁calls▁end｜>"))

_MISTRAL = re.compile(
    r"\s{0,8}([A-Za-z0-9_.-]{1,128})(?:\[CALL_ID\][^\[{]{0,64})?(?:\[ARGS\])?\s{0,8}(?=\{)"
)
_MISTRAL_SO_FAR = re.compile(r"\s{0,8}[A-Za-z0-9_.-]{1,128}(?:\[(?:[CA][^\[{]{0,80})?){0,2}\s{0,8}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallForm:
    """The format of tool calls of models whose chat templates contain certain texts."""

    name: str
    known_by: tuple[str, ...]
    """Texts that a template must all have."""
    known_by_vocabulary: str = ""
    """A token that selects this format, if the template does not mention calls."""
    marks: Mapping[str, Begin] = field(default_factory=dict)
    """The marks that begin a call, in addition to the usual ones."""
    bare: Bare = bare_json
    """Recognises calls without a mark."""
    shape: CallShape
    """The shape of calls that a grammar forces."""
    has_channels: bool = False
    """Whether answers are messages in channels; see `channels.py`."""
    tokens: tuple[str, ...] = ()
    """The special tokens that a parser must see, though tokenizers leave them out of text."""

    @property
    def all_marks(self) -> dict[str, Begin]:
        return {**_USUAL, **self.marks}


def call_form(template: str, has_token: Callable[[str], bool]) -> CallForm:
    """The format for a chat template, whose source may be empty, and a vocabulary."""
    for form in CALL_FORMS.values():
        if all(each in template for each in form.known_by):
            return form
        if template and form.known_by_vocabulary and has_token(form.known_by_vocabulary):
            return form
    raise AssertionError("the last one is for all")


def _in_tool_call(types: ToolTypes, head: str) -> tuple[Body, int] | str | None:
    start = head.lstrip()
    place = len(head) - len(start)
    if not start or (len(start) < len(_FUNCTION_OPEN) and _FUNCTION_OPEN.startswith(start)):
        return None
    if start[0] in "{[":
        return MarkedBody(JsonBody(json_calls), _TOOL_CLOSE), place
    if start.startswith(_FUNCTION_OPEN):
        parse = partial(_function_call, types)
        return ClosedBody(_FUNCTION_END, parse, may_be_open=True), place
    if (named := _NAMED.match(start)) is not None:
        close = _TOOL_END if named[2] == _TOOL_CLOSE else _LAST_ARGUMENT_END
        return ClosedBody(close, partial(_named_call, types)), place
    return None if _NAMED_SO_FAR.fullmatch(start) else "no call begins so"


def _after_mistral(head: str) -> tuple[Body, int] | str | None:
    if (named := _MISTRAL.match(head)) is not None:
        return JsonBody(partial(json_calls, name=named[1])), named.end()
    if head.lstrip().startswith(("{", "[")):
        return _json_only("", head)
    may_be_named = not head.strip() or _MISTRAL_SO_FAR.fullmatch(head) is not None
    return None if may_be_named else "no call begins so"


def _json_only(close: str, head: str) -> tuple[Body, int] | str | None:
    start = head.lstrip()
    if not start:
        return None
    if start[0] not in "{[":
        return "no JSON begins so"
    body = JsonBody(json_calls)
    return (MarkedBody(body, close) if close else body), len(head) - len(start)


def _lone_function(types: ToolTypes) -> Body:
    """The reader behind the mark of a function without one of a call, which Qwen 3 Coder often
    omits."""
    body = ClosedBody(_LONE_FUNCTION_END, lambda text: _function_call(types, _FUNCTION_OPEN + text))
    return MarkedBody(body, _TOOL_CLOSE)


def _begun(begin: str, body: Callable[[], Body], head: str) -> tuple[Body, int] | str | None:
    """The reader for a text with a fixed beginning."""
    start = head.lstrip()
    if start.startswith(begin):
        return body(), len(head) - len(start)
    return None if begin.startswith(start) else f"{begin} is missing"


def _function_call(types: ToolTypes, text: str) -> list[ToolCall] | None:
    text = text.strip()
    named = _FUNCTION.match(text)
    if named is None or not text.endswith(_FUNCTION_CLOSE):
        return None
    inner = text[named.end() : -len(_FUNCTION_CLOSE)]
    values = _pairs(inner, _PARAMETER, _PARAMETER_END)
    if values is None:
        return None
    known = types.get(named[1], {})
    arguments = {
        key: typed(value.removeprefix("\n").removesuffix("\n"), known.get(key, ()))
        for key, value in values.items()
    }
    return [ToolCall(name=named[1], arguments=arguments)]


def _named_call(types: ToolTypes, text: str) -> list[ToolCall] | None:
    name, opened, rest = text.strip().partition("<arg_key>")
    name = name.strip()
    values = _pairs(opened + rest, _ARGUMENT, _ARGUMENT_END)
    if values is None:
        return None
    known = types.get(name, {})
    arguments = {
        key.strip(): typed(value, known.get(key.strip(), ())) for key, value in values.items()
    }
    return [ToolCall(name=name, arguments=arguments)]


def _pairs(text: str, opens: re.Pattern[str], ends: re.Pattern[str]) -> dict[str, str] | None:
    """The values between opening and closing marks, by key; None: there is other text between."""
    found: dict[str, str] = {}
    text = text.strip()
    place = 0
    while place < len(text):
        opened = opens.match(text, place)
        ended = ends.search(text, opened.end()) if opened is not None else None
        if opened is None or ended is None:
            return None
        found[opened[1]] = text[opened.end() : ended.start()]
        space = _SPACE.match(text, ended.end())
        place = space.end() if space is not None else ended.end()
    return found


def _line_calls(text: str) -> list[ToolCall] | None:
    calls = python_lines(text)
    return json_calls(text) if calls is None else calls


def _list_calls(text: str) -> list[ToolCall] | None:
    calls = python_calls(text)
    return json_calls(text) if calls is None else calls


def _deepseek_calls(text: str) -> list[ToolCall] | None:
    before, *parts = text.split(_SEEK_BEGIN)
    found: list[ToolCall] = []
    for part in parts:
        name, _between, arguments = part.partition(_SEEK_BETWEEN)
        arguments, _end, after = arguments.rpartition(_SEEK_END)
        if name.strip() == "function" and not arguments.lstrip().startswith("{"):  # DeepSeek 3
            name, _fence, arguments = arguments.partition("```json")
            arguments = arguments.rstrip().removesuffix("```")
        calls = json_calls(arguments, name.strip())
        if calls is None or not name.strip() or after.strip():
            return None
        found += calls
    return found if found and not before.strip() else None


_USUAL: Mapping[str, Begin] = {
    "<tool_call>": lambda types: ChosenBody(partial(_in_tool_call, types)),
    "[TOOL_CALLS]": lambda _types: ChosenBody(_after_mistral),
    "<|python_tag|>": lambda _types: ChosenBody(partial(_json_only, "")),
}
"""Marks that are recognised in the answers of every model."""

_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")

_JSON_SHAPE = json_shape(before="<tool_call>\n", after="\n</tool_call>", between="\n")
_FUNCTION_SHAPE = CallShape(
    open=lambda name: f"<tool_call>\n<function={name}>\n",
    close="</function>\n</tool_call>",
    between="\n",
    names=_NAME,
    argument=ArgumentShape(
        open=lambda name: f"<parameter={name}>\n",
        close="\n</parameter>\n",
        quotes=("", ""),
        names=_NAME,
    ),
    otherwise=_JSON_SHAPE,
)


def _named_shape(line: str) -> CallShape:
    """line: the line ending; GLM 4.7 writes none."""
    return CallShape(
        open=lambda name: f"<tool_call>{name}{line}",
        close="</tool_call>",
        between=line,
        names=_NAME,
        argument=ArgumentShape(
            open=lambda name: f"<arg_key>{name}</arg_key>{line}<arg_value>",
            close=f"</arg_value>{line}",
            quotes=("", ""),
            names=_NAME,
        ),
        otherwise=_JSON_SHAPE,
    )


_LIST_SHAPE = CallShape(
    before="<|tool_call_start|>[",
    open=lambda name: f"{name}(",
    close=")",
    between=", ",
    after="]<|tool_call_end|>",
    names=_NAME,
    argument=ArgumentShape(open=lambda name: f"{name}=", close="", between=", ", names=_WORD),
    otherwise=replace(
        json_shape(between=", "), before="<|tool_call_start|>[", after="]<|tool_call_end|>"
    ),
)
_LINES_SHAPE = CallShape(
    before="<function_calls>",
    open=lambda name: f"{name}(",
    close=")",
    between="\n",
    after="</function_calls>",
    names=_NAME,
    argument=ArgumentShape(open=lambda name: f"{name}=", close="", between=", ", names=_WORD),
    otherwise=replace(
        json_shape(between=", "), before="<function_calls>[", after="]</function_calls>"
    ),
)
_ACTION_SHAPE = CallShape(
    before="<|START_ACTION|>[\n    ",
    count='{"tool_call_id": "',
    open=lambda name: f'", "tool_name": {json.dumps(name, ensure_ascii=False)}, "parameters": ',
    close="}",
    between=",\n    ",
    after="\n]<|END_ACTION|>",
)
_GEMMA_SHAPE = CallShape(
    open=lambda name: f"<|tool_call>call:{name}{{",
    close="}<tool_call|>",
    names=_NAME,
    argument=ArgumentShape(
        open=lambda name: f"{name}:",
        close="",
        between=",",
        quotes=('<|"|>', '<|"|>'),
        names=_WORD,
    ),
    otherwise=CallShape(
        open=lambda name: f"<|tool_call>call:{name}",
        close="<tool_call|>",
        names=_NAME,
        otherwise=json_shape(between="; "),
    ),
)


def _deepseek_shape(open: Callable[[str], str], close: str, between: str) -> CallShape:
    return CallShape(
        before="<｜tool▁calls▁begin｜>",
        open=open,
        close=close,
        between=between,
        after="<｜tool▁calls▁end｜>",
    )


def _closed(begin: str, close: re.Pattern[str], parse: Parse) -> Begin:
    body = partial(ClosedBody, close, parse, may_be_open=True)
    return lambda _types: ChosenBody(partial(_begun, begin, body))


_DEEPSEEK_MARKS = {"<｜tool▁calls▁begin｜>": _closed(_SEEK_BEGIN, _SEEK_ALL_END, _deepseek_calls)}
_DEEPSEEK_TOKENS = (*_DEEPSEEK_MARKS, "<｜tool▁calls▁end｜>", _SEEK_BEGIN, _SEEK_END, _SEEK_BETWEEN)
_NAMED_TOKENS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

_ALL = (
    CallForm(
        name="channels",
        known_by=(CHANNEL, MESSAGE),
        has_channels=True,
        shape=CallShape(
            thought=(f"{CHANNEL}analysis{MESSAGE}", f"{END}{START}assistant"),
            open=lambda name: f"{CHANNEL}commentary to=functions.{name} {CONSTRAIN}json{MESSAGE}",
            close="",
            most_calls=1,
        ),
        tokens=(START, CHANNEL, CONSTRAIN, MESSAGE, END),
    ),
    CallForm(
        name="gemma",
        known_by=("<|tool_call>",),
        marks={"<|tool_call>": _closed("call:", _GEMMA_END, gemma_call)},
        shape=_GEMMA_SHAPE,
        tokens=("<|tool_call>", "<tool_call|>", '<|"|>'),
    ),
    CallForm(
        name="list",
        known_by=("<|tool_call_start|>",),
        known_by_vocabulary="<|tool_call_start|>",
        marks={"<|tool_call_start|>": _closed("[", _LIST_END, _list_calls)},
        shape=_LIST_SHAPE,
        tokens=("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    CallForm(
        name="actions",
        known_by=("<|START_ACTION|>",),
        marks={
            "<|START_ACTION|>": lambda _types: ChosenBody(partial(_json_only, "<|END_ACTION|>")),
        },
        shape=_ACTION_SHAPE,
        tokens=("<|START_ACTION|>", "<|END_ACTION|>"),
    ),
    CallForm(
        name="lines",
        known_by=("<function_calls>",),
        marks={
            "<function_calls>": lambda _types: ClosedBody(
                re.compile(re.escape("</function_calls>")), _line_calls, may_be_open=True
            ),
        },
        shape=_LINES_SHAPE,
        tokens=("<function_calls>", "</function_calls>"),
    ),
    CallForm(
        name="deepseek fenced",
        known_by=("<｜tool▁calls▁begin｜>", "```json"),
        marks=_DEEPSEEK_MARKS,
        shape=_deepseek_shape(
            lambda name: f"{_SEEK_BEGIN}function{_SEEK_BETWEEN}{name}\n```json\n",
            f"\n```{_SEEK_END}",
            "\n",
        ),
        tokens=_DEEPSEEK_TOKENS,
    ),
    CallForm(
        name="deepseek",
        known_by=("<｜tool▁calls▁begin｜>",),
        marks=_DEEPSEEK_MARKS,
        shape=_deepseek_shape(lambda name: f"{_SEEK_BEGIN}{name}{_SEEK_BETWEEN}", _SEEK_END, ""),
        tokens=_DEEPSEEK_TOKENS,
    ),
    CallForm(
        name="function",
        known_by=("<tool_call>", "<function="),
        marks={_FUNCTION_OPEN: _lone_function},
        shape=_FUNCTION_SHAPE,
        tokens=("<tool_call>", _TOOL_CLOSE),
    ),
    CallForm(
        name="named inline",
        known_by=("<tool_call>", "</arg_key><arg_value>"),
        shape=_named_shape(""),
        tokens=("<tool_call>", _TOOL_CLOSE, *_NAMED_TOKENS),
    ),
    CallForm(
        name="named",
        known_by=("<tool_call>", "<arg_key>"),
        shape=_named_shape("\n"),
        tokens=("<tool_call>", _TOOL_CLOSE, *_NAMED_TOKENS),
    ),
    CallForm(
        name="json",
        known_by=("<tool_call>",),
        shape=_JSON_SHAPE,
        tokens=("<tool_call>", _TOOL_CLOSE),
    ),
    CallForm(
        name="mistral",
        known_by=("[TOOL_CALLS]", "[ARGS]"),
        shape=CallShape(
            open=lambda name: f"[TOOL_CALLS]{name}[ARGS]",
            close="",
            names=_NAME,
            otherwise=replace(json_shape(between=", "), before="[TOOL_CALLS][", after="]"),
        ),
        tokens=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    ),
    CallForm(
        name="mistral list",
        known_by=("[TOOL_CALLS]",),
        shape=replace(json_shape(between=", "), before="[TOOL_CALLS][", after="]"),
        tokens=("[TOOL_CALLS]",),
    ),
    CallForm(
        name="named line",
        known_by=("<|observation|>",),
        bare=bare_line,
        shape=CallShape(
            open=lambda name: f"{name}\n",
            close="",
            between="\n",
            names=_NAME,
            otherwise=json_shape(between="; "),
        ),
    ),
    CallForm(
        name="bare parameters",
        known_by=('"parameters"',),
        shape=json_shape(between="; ", key="parameters"),
    ),
    CallForm(name="bare", known_by=(), shape=json_shape(between="; ")),
)

CALL_FORMS: Mapping[str, CallForm] = {form.name: form for form in _ALL}
"""The formats by name; the first one whose texts a template has is its format."""
