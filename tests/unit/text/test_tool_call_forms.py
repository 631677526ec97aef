"""What a model's chat template writes as a call is read as that call, in every form of calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_parsing.response_parser import parse_response

from edge.text import TextStream, Tokenizer
from edge.text.answer_forms import AnswerForm, answer_form
from edge.text.answer_parser import AnswerParser, read_answer
from edge.text.answer_parts import AnswerPart, ReadAnswer, Said, ToolCall
from edge.text.channels import ChannelReader
from edge.text.grammar import Grammars
from edge.text.tool_call_bodies import Body, Ended
from edge.text.tool_call_forms import CALL_FORMS
from edge.text.tool_call_grammars import calls_grammar
from edge.text.tool_types import ToolTypes, tool_types, typed
from tests.support.call_templates import CALL_TEMPLATES, answer_of, cut, parts_of
from tests.support.small_tokenizers import byte_fallback, byte_level, write_checkpoint

FORMS = [*CALL_TEMPLATES]
BARE = ("bare parameters", "named line")
WITH_MARKS = [name for name in FORMS if name not in BARE]

names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,12}", fullmatch=True)
words = st.sampled_from(
    ["it's", '"', "\\", "\n", "</b>", "<", "}", "]", ")", ", ", "{", "é", "𝄞", "5", "true", "null",
     "</tool_call>", "<function=f>", "\t", " "]
)  # fmt: skip
texts = st.lists(words, max_size=5).map("".join)
scalars = texts | st.integers() | st.booleans() | st.none() | st.floats(-1e9, 1e9)
values = st.recursive(
    scalars, lambda held: st.lists(held, max_size=3) | st.dictionaries(names, held, max_size=3),
    max_leaves=6,
)  # fmt: skip
calls_of_tools = st.lists(
    st.builds(
        lambda name, arguments: ToolCall(name=name, arguments=arguments),
        names,
        st.dictionaries(names, values, max_size=3),
    ),
    min_size=1,
    max_size=3,
)

KINDS = {
    bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object",
    type(None): "null",
}  # fmt: skip


def types_of(calls: list[ToolCall]) -> ToolTypes:
    """Of tools that take these arguments, whichever of them is called."""
    found: dict[str, dict[str, tuple[str, ...]]] = {}
    for call in calls:
        tool = found.setdefault(call.name, {})
        for key, value in call.arguments.items():
            tool[key] = (KINDS[type(value)],)
    return found


def alike(calls: list[ToolCall]) -> list[ToolCall]:
    """One call for each tool, so that its arguments have one type."""
    return [*{call.name: call for call in calls}.values()]


@pytest.mark.parametrize("form", FORMS)
def test_a_template_tells_its_form(form: str) -> None:
    assert answer_form(CALL_TEMPLATES[form]).calls == form
    assert answer_form("").calls == "bare"


few = settings(max_examples=10)
"""Of each form: all of them share most of what is tried."""


@pytest.mark.parametrize("form", FORMS)
@few
@given(
    calls_of_tools.map(alike),
    st.lists(st.integers(0, 3000), max_size=12),
    st.sampled_from(["", "I look. ", "a < b [c] {d"]),
)
def test_what_is_written_is_read(
    form: str, calls: list[ToolCall], cuts: list[int], said: str
) -> None:
    if form in BARE:
        said = ""
    text, types, how = answer_of(form, calls, said), types_of(calls), AnswerForm(calls=form)
    expected = ReadAnswer(content=said.strip(), reasoning="", tool_calls=tuple(calls))
    assert read_answer(text, how, tools=types) == expected
    whole = parts_of([text], how, tools=types)
    assert parts_of(cut(text, cuts), how, tools=types) == whole
    assert parts_of(list(text), how, tools=types) == whole


AS_OTHERS_READ: dict[str, dict[str, Any]] = {
    "function": {
        "open_pattern": r"<tool_call>\s*<function=(?P<name>[^>]+)>",
        "close_pattern": r"</function>\s*</tool_call>",
        "content": "xml-inline",
        "content_args": {
            "tag_pattern": r"<parameter=(?P<key>[^>]+)>\n(?P<value>.*?)\n</parameter>\n(?=<|$)"
        },
    },
    "named": {
        "open_pattern": r"<tool_call>(?P<name>[^\n<]+)\n",
        "close": "</tool_call>",
        "content": "xml-inline",
        "content_args": {
            "tag_pattern": r"<arg_key>(?P<key>.*?)</arg_key>\s*"
            r"<arg_value>(?P<value>.*?)</arg_value>"
        },
    },
}


@pytest.mark.parametrize("form", AS_OTHERS_READ)
def test_transformers_reads_the_same(form: str) -> None:
    values = [
        "it's",
        "",
        " a ",
        "5",
        "true",
        "é\n{",
        "\n",
        5,
        -2.5,
        True,
        None,
        [1, {}],
        {"b": "<"},
    ]
    calls = [
        ToolCall(name="f", arguments={f"x{at}": value for at, value in enumerate(values)}),
        ToolCall(name="g", arguments={"x": 1}),
    ]
    shown = {"name": "{name}", "arguments": "{content}"}
    field = {"repeats": True, "transform": {"type": "function", "function": shown}}
    template = {
        "start_anchor": "<none>",
        "fields": {"content": {}, "tool_calls": {**AS_OTHERS_READ[form], **field}},
    }
    types = types_of(calls)
    tools: list[Any] = [
        {
            "type": "function",
            "function": {
                "name": name,
                "parameters": {
                    "properties": {key: {"type": each[0]} for key, each in tool.items()}
                },
            },
        }
        for name, tool in types.items()
    ]
    text = answer_of(form, calls)
    theirs = parse_response(text, template, prefix="", tools=tools)
    found = [ToolCall(**each["function"]) for each in theirs["tool_calls"]]
    assert [*read_answer(text, AnswerForm(calls=form), tools=tool_types(tools)).tool_calls] == found


@pytest.mark.parametrize("form", FORMS)
@few
@given(
    calls_of_tools.map(alike), st.lists(st.integers(0, 3000), max_size=12), st.sampled_from("a<[{")
)
def test_no_call_comes_of_a_tool_that_was_not_offered(
    form: str, calls: list[ToolCall], cuts: list[int], offered: str
) -> None:
    """It stays text, and so does all of it where no tool was offered."""
    how, text = AnswerForm(calls=form), answer_of(form, calls)
    others = types_of([ToolCall(name=f"other {offered}", arguments={})])
    for tools in ({}, others):
        read = read_answer(text, how, tools=tools)
        assert not read.tool_calls
        if form != "channels":  # there the marks of messages are no text
            assert read.content == text
        assert parts_of(cut(text, cuts), how, tools=tools) == parts_of([text], how, tools=tools)


@pytest.mark.parametrize("form", WITH_MARKS)
def test_a_call_behind_one_of_a_stranger_is_read(form: str) -> None:
    """Where a call may stand within a text, what is within the stranger's arguments is not."""
    inner = ToolCall(name="f", arguments={"x": 1})
    held = answer_of(form, [inner]) if form in ("json", "mistral", "mistral list") else "x"
    stranger = ToolCall(name="stranger", arguments={"a": held})
    text = answer_of(form, [stranger])
    if form == "channels":
        text += "<|call|><|start|>assistant"
    read = read_answer(text + answer_of(form, [inner]), AnswerForm(calls=form), tools={"f": {}})
    assert read.tool_calls == (inner,)
    assert "stranger" in read.content


def test_a_quote_ends_a_text_however_much_white_space_is_behind_it() -> None:
    text = '<|tool_call>call:f{x:{"y"' + " \n" * 20 + ': 1, "z": 2}}<tool_call|>'
    read = read_answer(text, AnswerForm(calls="gemma"), tools={"f": {"x": ("object",)}})
    assert read.tool_calls == (ToolCall(name="f", arguments={"x": {"y": 1, "z": 2}}),)


@pytest.mark.parametrize("form", WITH_MARKS)
def test_text_behind_calls_and_thoughts_before_them(form: str) -> None:
    call = ToolCall(name="f", arguments={"x": 1})
    text = f"<think>\nso\n</think>\n\nFirst. {answer_of(form, [call, call])}\n Then."
    if form == "channels":
        text = (
            "<|channel|>analysis<|message|>so<|end|><|start|>assistant"
            f"{answer_of(form, [call, call], 'First.')}<|end|>"
            "<|start|>assistant<|channel|>final<|message|>Then."
        )
    expected = ReadAnswer(
        content="First.\n\nThen." if form == "channels" else "First. Then.",
        reasoning="so",
        tool_calls=(call, call),
    )
    assert read_answer(text, AnswerForm(calls=form), tools={"f": {"x": ("integer",)}}) == expected


@pytest.mark.parametrize("form", FORMS)
@few
@given(st.data())
def test_a_broken_call_stays_text_and_nothing_is_lost(form: str, data: st.DataObject) -> None:
    """One that ends too early, at any place, or lacks a part."""
    call = ToolCall(name="f", arguments={"x": 1, "s": "a\nb"})
    whole = answer_of(form, [call])
    begin = data.draw(st.integers(0, len(whole)))
    count = data.draw(st.integers(1, len(whole)))
    text = whole[:begin] + whole[begin + count :]
    how, types = AnswerForm(calls=form), types_of([call])
    read = read_answer(text, how, tools=types)
    if not read.tool_calls and form != "channels":  # there the marks of messages are no text
        assert read.content == text
    parts = parts_of(list(text), how, tools=types)
    assert parts == parts_of([text], how, tools=types)


parts_of_marks = st.sampled_from(
    sorted(
        {token for form in CALL_FORMS.values() for token in form.tokens}
        | {"<function=f>", "<parameter=x>", "</parameter>", "</function>", "call:f{", "x:1", "}",
           "[f(", "x=1", ")]", "f", "function", "```json", "```", '{"x": 1}', "[", "]", '"', "\\",
           "\n", " ", "text", "<|python_tag|>", "<think>", "</think>"}
    )
)  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@few
@given(
    st.lists(parts_of_marks, max_size=14).map("".join), st.lists(st.integers(0, 500), max_size=9)
)
def test_pieces_change_nothing(form: str, text: str, cuts: list[int]) -> None:
    how, tools = AnswerForm(calls=form), {"f": {"x": ("integer",)}}
    whole = parts_of([text], how, tools=tools)
    assert parts_of(cut(text, cuts), how, tools=tools) == whole
    assert parts_of(list(text), how, tools=tools) == whole
    is_text = form != "channels" and "<think>" not in text[:70]
    if is_text and not any(isinstance(part, ToolCall) for part in whole):
        assert "".join(part.text for part in whole if isinstance(part, Said)) == text


class Counted:
    """Counts the characters that bodies of calls look at."""

    characters = 0

    def __init__(self, body: Body) -> None:
        self.body, self.finish = body, body.finish

    def feed(self, text: str) -> Ended | None:
        ended: Ended | None = self.body.feed(text)
        Counted.characters += len(text) if ended is None else max(0, len(text) - len(ended.after))
        return ended


@pytest.mark.parametrize(
    "babble",
    ["<tool_call>{", '<tool_call>{"a":"', '<tool_call>["<tool_call>[",", ',
     "<tool_call>[TOOL_CALLS][", "<tool_call><function=f>", "<tool_call>f<arg_key>",
     "<|tool_call_start|>[f(", "<|tool_call>call:f{", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
     "[TOOL_CALLS]f[ARGS]{", "[TOOL_CALLS]f", "<tool_call>\n",
     "<|python_tag|>[", "{", "[", " ", "\\", "<function=", "<function=g></function>",
     "<function_calls>f(", "<|START_ACTION|>[", "f\n{"],
)  # fmt: skip
@pytest.mark.parametrize("begin", ["", '<tool_call>{"a": "', "<|tool_call>call:f{a:", "x"])
def test_work_grows_with_the_text_whatever_a_model_writes(babble: str, begin: str) -> None:
    """Whoever looked at all of it anew with every piece would have looked at each character more
    than seven times."""
    seen = []
    text = begin + babble * 100
    for form in ("gemma", "list", "deepseek", "function", "lines", "actions", "named line"):
        marks = {
            mark: lambda types, made=made: Counted(made(types))
            for mark, made in CALL_FORMS[form].all_marks.items()
        }
        Counted.characters = 0
        parser = AnswerParser(AnswerForm(calls=form), tools={"f": {}})
        parser._reader._calls._marks = marks  # type: ignore[union-attr]
        found: list[AnswerPart] = [
            part for at in range(0, len(text), 7) for part in parser.feed(text[at : at + 7])
        ]
        found += parser.finish()
        assert "".join(part.text for part in found if isinstance(part, Said)) == text
        seen.append(Counted.characters / len(text))
    assert max(seen) <= 3, seen


def test_arguments_are_typed_by_their_schemas() -> None:
    schema = {
        "name": "f",
        "parameters": {
            "type": "object",
            "$defs": {"size": {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/size"}]}},
            "properties": {
                "count": {"type": "integer"},
                "rate": {"type": ["number", "null"]},
                "word": {"type": "string"},
                "flag": {"type": "boolean"},
                "maybe": {"type": "string", "nullable": True},
                "choice": {"enum": [1, "one"]},
                "size": {"$ref": "#/$defs/size"},
                "any": {},
                "list": {"type": "array"},
            },
        },
    }
    types = tool_types([{"type": "function", "function": schema}])
    assert types == {
        "f": {
            "count": ("integer",), "rate": ("number", "null"), "word": ("string",),
            "flag": ("boolean",), "maybe": ("string", "null"), "choice": ("integer", "string"),
            "size": ("integer",), "any": (), "list": ("array",),
        }
    }  # fmt: skip
    cases: dict[str, dict[str, Any]] = {
        "count": {"5": 5, "5.0": 5, "5.5": "5.5", "1_0": "1_0", "9" * 5000: "9" * 5000},
        "rate": {"5": 5, "2.5": 2.5, "1e999": "1e999", "null": None, "nan": "nan"},
        "word": {"5": "5", "true": "true", "null": "null", " a ": " a "},
        "flag": {"true": True, "False": False, "1": "1"},
        "maybe": {"None": None, "some": "some"},
        "choice": {"1": 1, "one": "one"},
        "any": {"[1]": [1], "x": "x", "NaN": "NaN"},
        "list": {"[1, {}]": [1, {}], "{}": "{}", "[" * 9000: "[" * 9000},
    }  # fmt: skip
    for name, expected in cases.items():
        for text, value in expected.items():
            found = typed(text, types["f"][name])
            assert (found, type(found)) == (value, type(value)), (name, text)


def test_schemas_may_be_anything() -> None:
    assert tool_types([{}, {"name": 5}, {"name": "a", "parameters": 5}]) == {"a": {}}
    loop: dict[str, Any] = {
        "name": "a",
        "parameters": {"properties": {"x": {"$ref": "#/properties/x"}}},
    }
    assert tool_types([loop]) == {"a": {"x": ()}}
    deep: dict[str, Any] = {"type": "integer"}
    for _ in range(5000):
        deep = {"anyOf": [deep]}
    assert tool_types([{"name": "a", "parameters": {"properties": {"x": deep}}}]) == {
        "a": {"x": ()}
    }


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("f(a='it's', b=\"say \"hi\"\")", {"a": "it's", "b": 'say "hi"'}),
        (r"f(a='\u00e9\x41\n\q\\', b='\ud834\udd1e\ud800')", {"a": "éA\n\\q\\", "b": "𝄞\ufffd"}),
        ("f(a=[1, -2.5e3,], b={'c': None}, )", {"a": [1, -2500.0], "b": {"c": None}}),
        ("f(a=1e999)", None),
        ("f(1)", None),
        ("f(a=g())", None),
        ("f(a=" + "[" * 50 + "]" * 50 + ")", None),
        ("f(a=" + "9" * 5000 + ")", None),
        ("f(a='no end)", None),
    ],
)  # fmt: skip
def test_calls_as_in_python(text: str, arguments: dict[str, Any] | None) -> None:
    whole = f"<|tool_call_start|>[{text}]<|tool_call_end|>"
    read = read_answer(whole, AnswerForm(calls="list"), tools={"f": {}})
    expected = [] if arguments is None else [ToolCall(name="f", arguments=arguments)]
    assert [*read.tool_calls] == expected
    assert read.content == ("" if expected else whole)


LONE = "<function=f>\n<parameter=x>\n5\n</parameter>\n</function>"
FIVE = ToolCall(name="f", arguments={"x": 5})


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        ("function", LONE, "", [FIVE]),
        ("function", f"{LONE}\n</tool_call>", "", [FIVE]),
        ("function", f"I look.\n{LONE}\n</tool_call>\n{LONE} Done", "I look.\nDone", [FIVE] * 2),
        ("function", f"{LONE}\n<tool_call>\n{LONE}\n</tool_call>", "", [FIVE] * 2),
        ("function", f"{LONE} </tool_", "</tool_", [FIVE]),
        ("function", LONE[:-3], LONE[:-3], []),
        ("function", "<function=f></function>", "", [ToolCall(name="f", arguments={})]),
        ("function", "<function=other></function> x", "<function=other></function> x", []),
        ("json", LONE, LONE, []),
        ("named line", '\nf\n{"x": 5}\n', "", [FIVE]),
        ("named line", 'f \n {"x": 5}g', "g", [FIVE]),
        ("named line", "f is a tool", "f is a tool", []),
        ("named line", 'other\n{"x": 5}', 'other\n{"x": 5}', []),
        ("named line", '{"name": "f", "parameters": {"x": 5}}', "", [FIVE]),
        ("named line", 'ff\n{"x": 5}', 'ff\n{"x": 5}', []),
        ("lines", "<function_calls>\nf(x=5)\nf(x=5)\n</function_calls>", "", [FIVE] * 2),
        ("lines", "<function_calls>f(5", "<function_calls>f(5", []),
        ("lines", '<function_calls>[{"name": "f", "arguments": {"x": 5}}]</function_calls>', "",
         [FIVE]),
        ("actions", '<|START_ACTION|>[{"tool_name": "f", "parameters": {"x": 5}}]', "", [FIVE]),
        ("actions", '<|START_ACTION|>[{"tool_name": 5}]<|END_ACTION|>',
         '<|START_ACTION|>[{"tool_name": 5}]<|END_ACTION|>', []),
    ],
)  # fmt: skip
def test_what_models_make_of_their_forms(
    form: str, text: str, content: str, calls: list[ToolCall]
) -> None:
    how, types = AnswerForm(calls=form), {"f": {"x": ("integer",)}}
    expected = ReadAnswer(content=content, reasoning="", tool_calls=tuple(calls))
    assert read_answer(text, how, tools=types) == expected
    assert parts_of(list(text), how, tools=types) == parts_of([text], how, tools=types)


def test_text_is_not_held_back_where_a_call_begins_with_the_name_of_its_tool() -> None:
    parser = AnswerParser(AnswerForm(calls="named line"), tools={"find": {}})
    assert parser.feed("fi") == []
    assert parser.feed("r") == [Said("fir")]


def test_a_list_of_calls_may_be_json() -> None:
    text = json.dumps([{"name": "f", "arguments": {"x": 1}}])
    whole = f"<|tool_call_start|>{text}<|tool_call_end|>"
    read = read_answer(whole, AnswerForm(calls="list"), tools={"f": {}})
    assert read.tool_calls == (ToolCall(name="f", arguments={"x": 1}),)


def opened(folder: Path, form: str, template: str, backend: tokenizers.Tokenizer) -> Tokenizer:
    """With every mark of the form a special token, as publishers have them, and one beside."""
    how = AnswerForm(calls=form, thoughts="analysis" if form == "channels" else "THINK")
    backend.add_special_tokens([*sorted(how.tokens), "<|other|>"])
    write_checkpoint(folder, backend, {"chat_template": template})
    return Tokenizer.open(folder)


@pytest.mark.parametrize("form", WITH_MARKS)
def test_marks_that_are_special_tokens_are_read(form: str, tmp_path: Path) -> None:
    call = ToolCall(name="f", arguments={"x": 1, "s": "it's é"})
    template = CALL_TEMPLATES[form] + "[THINK]"
    tokenizer = opened(tmp_path, form, template, byte_level())
    answer = f"[THINK]so[/THINK]{answer_of(form, [call], 'Hi<|other|>. ')}"
    if form == "channels":
        thought = "<|channel|>analysis<|message|>so<|end|><|start|>assistant"
        answer = thought + answer_of(form, [call], "Hi<|other|>.")
    ids = tokenizer._backend.encode(answer, add_special_tokens=False).ids
    marks = {tokenizer.token_id(mark) for mark in CALL_FORMS[form].tokens}
    assert None not in marks
    assert marks & {*ids}
    stream = TextStream(tokenizer, tokenizer.encode("prompt"))
    text = "".join(map(stream.push, ids)) + stream.finish()
    assert text == answer.replace("<|other|>", "")
    assert tokenizer.vocabulary.decode(ids) == text
    assert read_answer(text, tokenizer.answer_form, tools=types_of([call])) == ReadAnswer(
        content="Hi.", reasoning="so", tool_calls=(call,)
    )
    marks_of_thoughts = tokenizer.answer_form.thinking_marks
    assert marks_of_thoughts.close not in tokenizer.decode(ids)  # as transformers has it
    for mark, begins in ((marks_of_thoughts.open, True), (marks_of_thoughts.close, False)):
        prompt = tokenizer._backend.encode(f"Hello. {mark}\n").ids
        assert tokenizer.begins_thinking(prompt) == begins


def test_marks_behind_a_window_of_tokens(tmp_path: Path) -> None:
    """Where spaces are pieces, a text is decoded behind the last ones."""
    tokenizer = opened(tmp_path, "list", CALL_TEMPLATES["list"], byte_fallback())
    ids = tokenizer._backend.encode("the dog <|tool_call_start|>[f(é=1)]<|tool_call_end|>").ids
    stream = TextStream(tokenizer)
    text = "".join(map(stream.push, ids)) + stream.finish()
    assert text == tokenizer.vocabulary.decode(ids)
    assert read_answer(text, tokenizer.answer_form, tools={"f": {}}).tool_calls == (
        ToolCall(name="f", arguments={"é": 1}),
    )


@pytest.mark.parametrize("form", WITH_MARKS)
def test_calls_may_be_forced_by_tokens_that_are_marks(form: str, tmp_path: Path) -> None:
    tokenizer = opened(tmp_path, form, CALL_TEMPLATES[form], byte_level())
    grammars = Grammars(
        tokenizer.vocabulary, vocab_size=tokenizer.vocab_size, end_ids=frozenset({0})
    )
    tools = [{"name": "f", "parameters": {"properties": {"x": {"type": "integer"}}}}]
    matcher = grammars.begin(calls_grammar(tools, CALL_FORMS[form].shape, several=True))
    text = answer_of(form, [ToolCall(name="f", arguments={"x": 15})]).rstrip()
    if form == "channels":
        text = f"<|channel|>analysis<|message|>why?<|end|><|start|>assistant{text}"
    ids = tokenizer._backend.encode(text, add_special_tokens=False).ids
    assert {*ids} & {tokenizer.token_id(mark) for mark in CALL_FORMS[form].tokens}
    for token in ids:
        matcher.take(token)
    assert matcher.allowed()[0] & 1


def test_a_token_tells_the_form_where_the_template_says_nothing(tmp_path: Path) -> None:
    template = "{{ messages[0].content }}{{ tools }}"
    assert opened(tmp_path / "a", "list", template, byte_level()).answer_form.calls == "list"
    assert opened(tmp_path / "b", "gemma", template, byte_level()).answer_form.calls == "bare"


@pytest.mark.parametrize(
    ("template", "thoughts"),
    [
        ("… <think> …", "think"), ("", "think"), ("[THINK] <think>", "THINK"),
        ("<|channel>thought\\n", "channel"), ("<seed:think>", "seed"),
    ],
)  # fmt: skip
def test_a_template_tells_the_marks_of_thinking(template: str, thoughts: str) -> None:
    form = answer_form(template)
    assert form.thoughts == thoughts
    marks = form.thinking_marks
    text = f" {marks.open}why < not?{marks.close}\n\nSo."
    expected = ReadAnswer(content="So.", reasoning="why < not?", tool_calls=())
    assert read_answer(text, form) == expected
    assert parts_of(list(text), form) == parts_of([text], form)
    assert read_answer(f"why < not?{marks.close}So.", form, thinking=True) == expected


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        ("<|channel|>final<|message|>Hi", "", "Hi", 0),
        ("<|channel|>analysis<|message|>so<|end|>", "so", "", 0),
        ("<|message|>Hi<|return|>", "", "Hi", 0),
        ('{"a": 1}', "", '{"a": 1}', 0),
        ("to be < or <|not", "", "to be < or <|not", 0),
        ("tomorrow", "", "tomorrow", 0),
        ("t", "", "t", 0),
        ("<|channel|>final<|message|>a <|b <|constrain|> c", "", "a <|b <|constrain|> c", 0),
        ("<|channel|>analysis<|message|>a<|start|><|channel|>final<|message|>b", "a", "b", 0),
        ("<|channel|>analysis<|message|>a<|channel|>final<|message|>b", "a", "b", 0),
        ("<|channel|>final<|message|>a<|end|><|start|>assistant<|chan", "", "a", 0),
        ("<|channel|>commentary to=functions.f<|message|>{}<|call|>", "", "", 1),
        (" to=functions.f<|channel|>commentary json<|message|>{}", "", "", 1),
        ("<|channel|>commentary to=functions.f <|constrain|>json<|message|> <|call|>", "", "", 1),
        ("<|channel|>analysis to=functions.f code<|message|>{}<|call|>", "", "", 1),
        ("<|channel|>commentary to=all<|message|>{}", "", "{}", 0),
        ("<|channel|>final<|message|>" + "<|message|>" * 3, "", "<|message|>" * 3, 0),
        ("<|start|>" + "x" * 600, "", "<|start|>" + "x" * 600, 0),
        (
            "<|channel|>commentary to=functions.f<|message|>{bro", "",
            "<|channel|>commentary to=functions.f<|message|>{bro", 0,
        ),
        (
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b",
            "a\n\nb", "", 0,
        ),
    ],
)  # fmt: skip
def test_answers_in_channels(text: str, reasoning: str, content: str, calls: int) -> None:
    form = AnswerForm(calls="channels", thoughts="analysis")
    call = ToolCall(name="f", arguments={})
    expected = ReadAnswer(content=content, reasoning=reasoning, tool_calls=(call,) * calls)
    tools: ToolTypes = {"f": {}}
    assert read_answer(text, form, tools=tools) == expected
    assert parts_of(list(text), form, tools=tools) == parts_of([text], form, tools=tools)


def test_an_answer_may_begin_within_a_channel() -> None:
    form = AnswerForm(calls="channels", thoughts="analysis")
    text = "so<|end|><|start|>assistant<|channel|>final<|message|>Hi"
    expected = ReadAnswer(content="Hi", reasoning="so", tool_calls=())
    assert read_answer(text, form, thinking=True) == expected


@pytest.mark.parametrize(
    "babble", ["<|channel|>", "<|start|>", "<|start|>a", " ", "to=", "<|constrain|>", "<|", "x",
               "<|channel|>commentary to=f<|message|>{", "<|message|>", "<|end|>"],
)  # fmt: skip
def test_what_waits_of_channels_is_short(babble: str) -> None:
    """But for the arguments of a call, which are looked at once, at its end."""
    for begin in ("", "<|channel|>", "<|channel|>analysis<|message|>"):
        reader = ChannelReader(["f"])
        for at in range(300):
            reader.feed(begin if at == 0 else babble)
            assert len(reader._header) + len(reader._tail) < 600
        reader.finish()
