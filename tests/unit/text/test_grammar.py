"""Grammars of answers: which tokens may come, in comparison with trying each of them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import jsonschema
import numpy as np
import pytest

from edge.demos.bundled import MODEL
from edge.errors import RequestError
from edge.text import Tokenizer
from edge.text.answer_forms import AnswerForm
from edge.text.answer_parser import read_answer
from edge.text.answer_parts import ToolCall
from edge.text.detokenizer import Vocabulary
from edge.text.grammar import Grammar, Grammars, Matcher, json_rule, schema_grammar
from edge.text.tool_call_forms import CALL_FORMS
from edge.text.tool_call_grammars import calls_grammar
from edge.text.tool_types import tool_types
from tests.support.call_templates import CALL_TEMPLATES, answer_of, random_schema
from tests.support.small_tokenizers import KINDS, letters

PIECES = ["a", "b", "ab", "ba", "1", "12", "Ġ", "<end>"]
END = PIECES.index("<end>")
FAR = ("words", "far_reaching")


@pytest.fixture(scope="module")
def small() -> Grammars:
    return Grammars(Vocabulary(letters(PIECES)), vocab_size=11, end_ids=frozenset({END}))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.open(MODEL)


@pytest.fixture(scope="module")
def bundled(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer.vocabulary, vocab_size=tokenizer.vocab_size, end_ids=frozenset({2}))


def may_come(matcher: Matcher, vocab_size: int) -> list[int]:
    bits = np.unpackbits(matcher.allowed(), count=vocab_size, bitorder="little")
    return np.flatnonzero(bits).tolist()


@pytest.mark.parametrize(
    ("rules", "texts"),
    [
        ('start: "ab" | "aba" | "1"', ["ab", "aba", "1"]),
        ("start: /a?b{1,2} ?/", ["b", "bb", "ab", "abb", "b ", "bb ", "ab ", "abb "]),
        ('start: x x\nx: "a" | "ba"', ["aa", "aba", "baa", "baba"]),
    ],
)
def test_a_token_may_come_where_a_text_of_the_grammar_goes_on_with_it(
    small: Grammars, rules: str, texts: list[str]
) -> None:
    """Every text that tokens can spell: padding and special tokens never come inside one."""
    spelt = [piece.replace("Ġ", " ") for piece in PIECES[:END]]

    def follow(tokens: list[int]) -> None:
        matcher = small.begin(Grammar(rules))
        for token in tokens:
            matcher.take(token)
        so_far = "".join(spelt[token] for token in tokens)
        expected = [
            token
            for token, each in enumerate(spelt)
            if any(text.startswith(so_far + each) for text in texts)
        ]
        assert may_come(matcher, 11) == [*expected, *([END] if so_far in texts else [])]
        for token in expected:
            follow([*tokens, token])

    follow([])


def test_a_token_that_may_not_come_is_an_error(small: Grammars) -> None:
    matcher = small.begin(Grammar('start: "ab"'))
    with pytest.raises(RequestError, match=r"token 1 is not of the answer's grammar"):
        matcher.take(1)


def drawn(grammars: Grammars, tokenizer: Tokenizer, matcher: Matcher, seed: int) -> str:
    """The answer of a model that knows nothing: of the tokens that may come, any is as likely."""
    draw = np.random.default_rng(seed)
    tokens: list[int] = []
    while len(tokens) < 2000:
        allowed = may_come(matcher, tokenizer.vocab_size)
        token = allowed[draw.integers(len(allowed))]
        if token == 2:
            return tokenizer.decode(tokens)
        matcher.take(token)
        tokens.append(token)
    raise AssertionError(f"no end after {tokenizer.decode(tokens)!r}")


def test_answers_to_200_random_schemas_are_valid(tokenizer: Tokenizer, bundled: Grammars) -> None:
    for seed in range(200):
        schema = random_schema(seed)
        text = drawn(bundled, tokenizer, bundled.begin(schema_grammar(schema)), seed)
        check = jsonschema.Draft202012Validator(
            schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
        )
        assert not [*check.iter_errors(json.loads(text))], (schema, text)


RECORD = {"type": "object", "additionalProperties": {"type": "integer"}}
FOLLOWED: list[Any] = [
    # As Zod 4 writes records.
    {**RECORD, "propertyNames": {"type": "string"}},
    {**RECORD, "propertyNames": {"type": "string", "minLength": 0, "title": "T"}},
    {**RECORD, "propertyNames": True},
    {**RECORD, "propertyNames": {"type": "string", "enum": ["ab", "c"]}, "required": ["c"]},
    {**RECORD, "propertyNames": {"const": "ab"}},
    {**RECORD, "propertyNames": {"type": "string", "minLength": 1}},
    {**RECORD, "propertyNames": {"pattern": "^x[0-9]$"}},
    {"type": "object", "propertyNames": {"pattern": "^[ab]$"}},
    # As pydantic and OpenAPI write types that JSON does not have.
    {"type": "string", "format": "path", "maxLength": 9},
    {"type": "string", "format": "binary", "maxLength": 9},
    {"type": "integer", "format": "uint32"},
    {"type": ["string", "null"], "format": "password", "maxLength": 3},
    {"type": "array", "items": {"type": "integer"}, "uniqueItems": False, "maxItems": 3},
    {"type": "array", "items": {"enum": ["a", "b", "c"], "type": "string"}, "uniqueItems": True},
    {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True, "minItems": 1},
    {
        "type": "array",
        "items": {"enum": ["a", "b", "c", "d", None]},
        "uniqueItems": True,
        "minItems": 2,
        "maxItems": 3,
    },
    {"type": "string", "format": "email", "pattern": "^(?!\\.)(?!.*\\.\\.)[a-z.]+@[a-z.]+$"},
]


@pytest.mark.parametrize("schema", FOLLOWED, ids=range(len(FOLLOWED)))
@pytest.mark.parametrize("nested", [False, True])
def test_keywords_that_constrain_nothing_refuse_no_schema(
    tokenizer: Tokenizer, bundled: Grammars, schema: dict[str, Any], nested: bool
) -> None:
    checked = {name: each for name, each in schema.items() if name != "pattern"}
    if nested:
        whole = {
            "$defs": {"d": schema},
            "properties": {"p": {"anyOf": [{"$ref": "#/$defs/d"}, {"type": "boolean"}]}},
            "required": ["p"],
            "additionalProperties": False,
        }
        schema, checked = whole, {**whole, "$defs": {"d": checked}}
    before = json.dumps(schema)
    valid = jsonschema.Draft202012Validator(checked)
    for seed in range(3):
        text = drawn(bundled, tokenizer, bundled.begin(schema_grammar(schema)), seed)
        assert not [*valid.iter_errors(json.loads(text))], text
    assert json.dumps(schema) == before


@pytest.mark.parametrize(
    "schema",
    [
        {
            "type": "object",
            "properties": {"a": {}, "b": {}},
            "additionalProperties": False,
            "propertyNames": {"enum": ["a"]},
        },
        {"type": "object", "additionalProperties": False, "propertyNames": {"not": {}}},
        {"type": "object", "propertyNames": False},
        {"type": "object", "propertyNames": {"enum": ["a", "b"], "const": "a"}},
        {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
    ],
)
def test_keywords_that_constrain_are_refused_and_not_dropped(
    bundled: Grammars, schema: dict[str, Any]
) -> None:
    with pytest.raises(RequestError, match="not supported"):
        bundled.begin(schema_grammar(schema))


def test_an_escaped_parenthesis_looks_at_nothing() -> None:
    schema = {"type": "string", "format": "email", "pattern": r"\(?=x"}
    assert "pattern" in json_rule(schema)
    assert "(?=x)" not in json_rule({**schema, "pattern": "(?=x)"})


def test_a_schema_is_not_repeated_beyond_bounds() -> None:
    """Each level would repeat what is below for each of its names."""
    schema: dict[str, Any] = {"type": "integer"}
    for _level in range(6):
        names = [f"name{number}" for number in range(100)]
        schema = {
            "type": "object",
            "propertyNames": {"enum": names},
            "additionalProperties": schema,
        }
    assert len(json_rule(schema)) < 1 << 18


def test_any_object_is_one(tokenizer: Tokenizer, bundled: Grammars) -> None:
    matcher = bundled.begin(schema_grammar("object"))
    for part in ('{"a": [1, {"b"', ": null}], ", '"ü": -2.5e3}'):
        for token in tokenizer._backend.encode(part, add_special_tokens=False).ids:
            matcher.take(token)
    assert may_come(matcher, tokenizer.vocab_size) == [2]


@pytest.mark.parametrize("name", CALL_FORMS)
def test_forced_calls_are_calls(tokenizer: Tokenizer, bundled: Grammars, name: str) -> None:
    """Each is one that the answer's parts are read from; arguments are as their schemas say."""
    reference = {"$defs": {"n": {"enum": [1, 2]}}, "properties": {"n": {"$ref": "#/$defs/n"}}}
    tools: list[dict[str, Any]] = [
        {"type": "function", "function": {"name": 'a"b', "parameters": {"const": {"x": 1}}}},
        {
            "type": "function",
            "function": {
                "name": "second",
                "parameters": {**reference, "required": ["n"], "additionalProperties": False},
            },
        },
    ]
    counts = set()
    form, shape = AnswerForm(calls=name), replace(CALL_FORMS[name].shape, thought=None)
    grammar = calls_grammar(tools, shape, several=True)
    for seed in range(12):
        answer = read_answer(
            drawn(bundled, tokenizer, bundled.begin(grammar), seed), form, tools=tool_types(tools)
        )
        assert (answer.content, bool(answer.tool_calls)) == ("", True)
        counts.add(len(answer.tool_calls))
        for call in answer.tool_calls:
            assert (
                call.arguments in ({'a"b': [{"x": 1}], "second": [{"n": 1}, {"n": 2}]})[call.name]
            )
    assert len(counts) > 1 or shape.most_calls == 1
    one = calls_grammar(tools[:1], shape, several=False, or_else={"const": 5})
    texts = {drawn(bundled, tokenizer, bundled.begin(one), seed).strip() for seed in range(12)}
    assert "5" in texts
    known = tool_types(tools)
    assert {len(read_answer(each, form, tools=known).tool_calls) for each in texts} == {0, 1}


def test_arguments_of_200_random_schemas_are_valid(tokenizer: Tokenizer, bundled: Grammars) -> None:
    """Of calls in every form, in turn."""
    names = list(CALL_FORMS)
    for seed in range(200):
        schema = random_schema(seed, depth=1)
        takes = {
            "type": "object",
            "properties": {"v": {key: each for key, each in schema.items() if key != "$defs"}},
            "required": ["v"],
            "additionalProperties": False,
            "$defs": schema.get("$defs", {}),
        }
        tools: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": takes}}]
        name = names[seed % len(names)]
        form, shape = AnswerForm(calls=name), replace(CALL_FORMS[name].shape, thought=None)
        matcher = bundled.begin(calls_grammar(tools, shape, several=False))
        text = drawn(bundled, tokenizer, matcher, seed)
        (call,) = read_answer(text, form, tools=tool_types(tools)).tool_calls
        check = jsonschema.Draft202012Validator(
            takes, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
        )
        assert not [*check.iter_errors(call.arguments)], (takes, text)


@pytest.mark.parametrize("name", CALL_FORMS)
def test_forced_calls_have_no_arguments_but_those_that_are_named(
    tokenizer: Tokenizer, bundled: Grammars, name: str
) -> None:
    """Where a schema is silent about further ones; and a tool that takes none is given none."""
    inner = {"type": "object", "properties": {"y": {"enum": [1]}}}
    takes = {"type": "object", "properties": {"x": inner}}
    tools: list[Any] = [{"name": "f", "parameters": takes}, {"name": "g"}]
    others: list[Any] = [{"name": "h", "parameters": {}}]
    none: list[Any] = [{"name": "i", "parameters": {"properties": {}}}]
    form, shape = AnswerForm(calls=name), replace(CALL_FORMS[name].shape, thought=None)
    seen = set()
    for chosen in ([*tools, *others], none):
        grammar = calls_grammar(chosen, shape, several=False)
        for seed in range(40):
            text = drawn(bundled, tokenizer, bundled.begin(grammar), seed)
            (call,) = read_answer(text, form, tools=tool_types(chosen)).tool_calls
            seen.add((call.name, json.dumps(call.arguments)))
    f = {("f", each) for each in ("{}", '{"x": {}}', '{"x": {"y": 1}}')}
    assert seen <= {*f, ("g", "{}"), ("h", "{}"), ("i", "{}")}
    assert len(seen & f) > 1


PLAIN: dict[str, Any] = {
    "type": "object",
    "properties": {
        "word": {"enum": ["it's", 'a "b"', "two\nlines"]},
        "count": {"type": "integer", "minimum": -3, "maximum": 3},
        "flag": {"type": "boolean"},
        "more": {
            "type": "object",
            "properties": {"x": {"enum": ["p", 5, None]}},
            "required": ["x"],
            "additionalProperties": False,
        },
    },
    "additionalProperties": False,
}


@pytest.mark.parametrize("name", CALL_FORMS)
@pytest.mark.parametrize("required", [[], ["count"], ["word", "more"]])
def test_forced_calls_have_the_models_own_form(
    tokenizer: Tokenizer, bundled: Grammars, name: str, required: list[str]
) -> None:
    """And arguments as their schemas say; which of them that need not be come differs."""
    schema = {**PLAIN, "required": required}
    tools = [{"type": "function", "function": {"name": "f-1", "parameters": schema}}]
    form, shape = AnswerForm(calls=name), replace(CALL_FORMS[name].shape, thought=None)
    grammar = calls_grammar(tools, shape, several=False)
    check = jsonschema.Draft202012Validator(schema)
    seen = set()
    for seed in range(10):
        text = drawn(bundled, tokenizer, bundled.begin(grammar), seed)
        own = "".join(map(re.escape, (shape.before, shape.count)))
        own += "[0-9]+" if shape.count else ""
        assert re.match(own + re.escape(shape.open("f-1").rstrip("{ ")), text), text
        answer = read_answer(text, form, tools=tool_types(tools))
        assert (answer.content, len(answer.tool_calls)) == ("", 1), text
        assert not [*check.iter_errors(answer.tool_calls[0].arguments)], text
        seen.add(frozenset(answer.tool_calls[0].arguments))
    assert len(seen) > 1


@pytest.mark.parametrize("name", CALL_FORMS)
@pytest.mark.parametrize("required", [[["word"]], [{}], ["unknown"]], ids=repr)
def test_what_a_schema_requires_may_be_anything(name: str, required: list[Any]) -> None:
    schema = {**PLAIN, "required": required}
    tools = [{"type": "function", "function": {"name": "f-1", "parameters": schema}}]
    assert calls_grammar(tools, CALL_FORMS[name].shape, several=False)


@pytest.mark.parametrize("name", CALL_TEMPLATES)
def test_what_a_template_writes_may_be_forced(
    tokenizer: Tokenizer, bundled: Grammars, name: str
) -> None:
    """With any text in it, as the template has it. Only within values there is JSON where
    templates write something else."""
    more = {"free": {"type": "string", "description": "Any."}}
    tools = [{"name": "f", "parameters": {**PLAIN, "properties": PLAIN["properties"] | more}}]
    many = {"count": 2, "flag": True, "more": {"x": "p"}, "free": "<a>\n"}
    calls = [ToolCall(name="f", arguments=each) for each in (many, {"word": "it's"}, {})]
    text = answer_of(name, calls).rstrip()
    if name == "list":
        text = text.replace("'<a>\n'", '"<a>\\n"').replace("'it\\'s'", '"it\'s"')
        text = text.replace("True", "true")
    if name == "gemma":
        text = text.replace('{x:<|"|>p<|"|>}', '{"x": "p"}')
    if name == "channels":
        text = answer_of(name, calls[:1])
    matcher = bundled.begin(calls_grammar(tools, CALL_FORMS[name].shape, several=True))
    for token in tokenizer._backend.encode(text, add_special_tokens=False).ids:
        matcher.take(token)
    assert 2 in may_come(matcher, tokenizer.vocab_size)


def test_a_thinking_model_thinks_first(tokenizer: Tokenizer, bundled: Grammars) -> None:
    matcher = bundled.begin(schema_grammar({"const": 7}), is_thinking=True)
    for token in tokenizer._backend.encode('so "7" </think>\n7', add_special_tokens=False).ids:
        matcher.take(token)
    assert may_come(matcher, tokenizer.vocab_size) == [2]


@pytest.mark.parametrize("name", [each for each in KINDS if each not in FAR])
def test_bytes_of_tokens_are_the_text_that_they_add(name: str) -> None:
    """In the middle of a text."""
    backend = KINDS[name]()
    vocabulary = Vocabulary(backend)
    ids = backend.encode(
        "The quick brown 日本語 naïve fox, isn't it?", add_special_tokens=False
    ).ids
    found = b"".join(vocabulary.bytes_of(each) or b"" for each in ids)
    assert found.decode(errors="replace").lstrip() == vocabulary.decode(ids).lstrip()


@pytest.mark.parametrize("name", FAR)
def test_where_a_text_depends_on_several_tokens_there_is_no_grammar(name: str) -> None:
    with pytest.raises(RequestError, match="answers cannot follow a grammar"):
        Vocabulary(KINDS[name]()).bytes_of(9)


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"not": {"type": "string"}}, '"not"'),
        ({"type": "object", "properties": {"a": {"uniqueItems": True, "type": "array"}}}, "unique"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"type": "object", "propertyNames": {"not": {"const": "a"}}}, "propertyNames"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "greater than maximum"),
        ({"$ref": "http://example.invalid/x"}, "does not fetch"),
        ({"enum": [float("nan")]}, "no JSON"),
        ({"enum": [{1, 2}]}, "no JSON"),
        ("text", "must be an object"),
        ({"description": "x" * 300_000}, "262144 are the most"),
    ],
)
def test_what_no_answer_can_be_kept_to_is_named(bundled: Grammars, schema: Any, said: str) -> None:
    with pytest.raises(RequestError, match=re.escape(said)) as raised:
        bundled.begin(schema_grammar(schema))
    assert "\n" not in str(raised.value)


DEEP: dict[str, Any] = {
    "$defs": {"z": {"properties": {"q": {"items": {"not": {}}}}}},
    "properties": {"b": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/z"}]}, "c": {}},
}


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"not": {}}, 'the JSON schema cannot be kept to: these keywords are not supported'),
        (DEEP, 'the JSON schema cannot be kept to: $defs.z.properties.q.items: these keywords are'),
        ({"prefixItems": [{}, {"pattern": "(a"}]},
         "kept to: prefixItems[1]: regex parse error: (a error: unclosed group"),
        ({"properties": {"\n" * 99: {"type": 5}}}, "type must be a string"),
        ({"properties": {f"x{at}": {"properties": {"a": {"not": {}}}} for at in range(3000)}},
         'cannot be kept to: these keywords are not supported: ["not"]'),
    ],
)  # fmt: skip
def test_which_field_of_a_schema_no_answer_can_be_kept_to_is_said(
    bundled: Grammars, schema: Any, said: str
) -> None:
    with pytest.raises(RequestError, match=re.escape(said)) as raised:
        bundled.begin(schema_grammar(schema))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", CALL_FORMS)
def test_which_field_of_which_tool_is_said_and_nothing_of_our_grammar(
    bundled: Grammars, name: str
) -> None:
    tools: list[Any] = [
        {"name": "good", "parameters": {"properties": {"x": {"type": "integer"}}}},
        {"name": 'b"d', "parameters": {"properties": {"x": DEEP["$defs"]["z"]}}},
        {"name": "bad", "parameters": {"properties": {"x": DEEP["$defs"]["z"]}}},
    ]
    for named in tools[1:]:
        grammar = calls_grammar([tools[0], named], CALL_FORMS[name].shape, several=True)
        with pytest.raises(RequestError) as raised:
            bundled.begin(grammar)
        said = str(raised.value)
        assert "properties.q.items: these keywords are not supported" in said
        assert json.dumps(named["name"]) in said
        assert "x" in said
        assert not any(each in said for each in ("call_0", "%json", " | ", "x-guidance"))


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _level in range(depth):
        schema = {"items": schema}
    return schema


HOSTILE: dict[str, Any] = {
    "deep": nested(50_000),
    "branching": {
        "allOf": [
            {"anyOf": [{"properties": {f"p{a}{b}": {"const": b}}} for b in range(3)]}
            for a in range(12)
        ]
    },
    "circle": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "multiples": {"type": "integer", "multipleOf": 982451653},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_takes_too_much_is_given_up(bundled: Grammars, name: str) -> None:
    with pytest.raises(RequestError):
        bundled.begin(schema_grammar(HOSTILE[name]))


def test_an_ambiguous_grammar_ends_its_own_answer(small: Grammars) -> None:
    with pytest.raises(RequestError, match="grammar"):  # noqa: PT012 - at some token
        matcher = small.begin(Grammar('start: a{0,1000}\na: b{0,1000}\nb: "a"{0,1000}'))
        for _token in range(1000):
            assert 0 in may_come(matcher, 11)
            matcher.take(0)


def test_a_model_that_knows_no_end_keeps_to_no_grammar() -> None:
    endless = Grammars(Vocabulary(letters(PIECES)), vocab_size=9, end_ids=frozenset())
    with pytest.raises(RequestError, match="eos_token_id"):
        endless.begin(Grammar('start: "a"'))


def test_what_no_token_can_write_is_said(small: Grammars) -> None:
    matcher = small.begin(Grammar('start: "a" "ü"'))
    matcher.take(PIECES.index("a"))
    with pytest.raises(RequestError, match=r"no token of the model has .*: ask for other"):
        matcher.allowed()
