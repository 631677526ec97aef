"""Chat templates that write tool calls in each form; random JSON schemas; answers cut in pieces.

A template is as short as can be. It is given `said` and `calls`, which have a name and arguments,
and writes an answer.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import jinja2

from edge.text.answer_forms import AnswerForm
from edge.text.answer_parser import AnswerParser
from edge.text.answer_parts import AnswerPart, Said, Thought, ToolCall
from edge.text.tool_types import ToolTypes

_FUNCTION = """\
{% for call in calls %}<tool_call>
<function={{ call.name }}>
{% for key, value in call.arguments.items() %}<parameter={{ key }}>
{{ value if value is string else value | tojson }}
</parameter>
{% endfor %}</function>
</tool_call>
{% endfor %}"""

_NAMED = """\
{% for call in calls %}<tool_call>{{ call.name }}
{% for key, value in call.arguments.items() %}<arg_key>{{ key }}</arg_key>
<arg_value>{{ value if value is string else value | tojson }}</arg_value>
{% endfor %}</tool_call>{{ '\n' if not loop.last }}{% endfor %}"""

_LIST = """\
{% macro shown(value) %}{% if value is string %}\
'{{ value | replace('\\\\', '\\\\\\\\') | replace("'", "\\\\'") }}'\
{% elif value is mapping %}{{ value | tojson }}{% else %}{{ value | string }}{% endif %}\
{% endmacro %}\
<|tool_call_start|>[{% for call in calls %}{{ call.name }}(\
{% for key, value in call.arguments.items() %}{{ key }}={{ shown(value) }}\
{{ ', ' if not loop.last }}{% endfor %}){{ ', ' if not loop.last }}{% endfor %}]<|tool_call_end|>"""

_LINES = """\
<function_calls>{% for call in calls %}{{ call.name }}(\
{% for key, value in call.arguments.items() %}{{ key }}={{ value | tojson }}\
{{ ', ' if not loop.last }}{% endfor %}){{ '\n' if not loop.last }}{% endfor %}</function_calls>"""

_ACTIONS = """\
<|START_ACTION|>[
    {% for call in calls %}{"tool_call_id": "{{ loop.index0 }}", \
"tool_name": {{ call.name | tojson }}, "parameters": {{ call.arguments | tojson }}}\
{{ ',\n    ' if not loop.last }}{% endfor %}
]<|END_ACTION|>"""

_NAMED_LINE = """\
{% for call in calls %}{{ '<|observation|>' if not calls }}{{ call.name }}
{{ call.arguments | tojson }}{{ '\n' if not loop.last }}{% endfor %}"""

_GEMMA = """\
{% macro shown(value) %}{% if value is string %}<|"|>{{ value }}<|"|>\
{% elif value is mapping %}{ {%- for key, held in value.items() %}{{ key }}:{{ shown(held) }}\
{{ ',' if not loop.last }}{% endfor %}}\
{% elif value is sequence %}[{% for held in value %}{{ shown(held) }}\
{{ ',' if not loop.last }}{% endfor %}]{% else %}{{ value | tojson }}{% endif %}{% endmacro %}\
{% for call in calls %}<|tool_call>call:{{ call.name }}{{ shown(call.arguments) }}<tool_call|>\
{% endfor %}"""

_DEEPSEEK = """\
<｜tool▁calls▁begin｜>{% for call in calls %}<｜tool▁call▁begin｜>{{ call.name }}<｜tool▁sep｜>\
{{ call.arguments | tojson }}<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>"""

_FENCED = """\
<｜tool▁calls▁begin｜>{% for call in calls %}<｜tool▁call▁begin｜>function<｜tool▁sep｜>\
{{ call.name }}
```json
{{ call.arguments | tojson }}
```<｜tool▁call▁end｜>{{ '\n' if not loop.last }}{% endfor %}<｜tool▁calls▁end｜>"""

_JSON = """\
{% for call in calls %}<tool_call>
{"name": {{ call.name | tojson }}, "arguments": {{ call.arguments | tojson }}}
</tool_call>{{ '\n' if not loop.last }}{% endfor %}"""

_MISTRAL = """\
{% for call in calls %}[TOOL_CALLS]{{ call.name }}[ARGS]{{ call.arguments | tojson }}{% endfor %}"""

_MISTRAL_LIST = """\
[TOOL_CALLS][{% for call in calls %}\
{"name": {{ call.name | tojson }}, "arguments": {{ call.arguments | tojson }}}\
{{ ', ' if not loop.last }}{% endfor %}]"""

_BARE = """\
{% for call in calls %}\
{"name": {{ call.name | tojson }}, "parameters": {{ call.arguments | tojson }}}\
{{ '; ' if not loop.last }}{% endfor %}"""

_CHANNELS = """\
{% if said %}<|channel|>commentary<|message|>{{ said }}<|end|><|start|>assistant{% endif %}\
{% for call in calls %}<|channel|>commentary to=functions.{{ call.name }} <|constrain|>json\
<|message|>{{ call.arguments | tojson }}\
{{ '<|call|><|start|>assistant' if not loop.last }}{% endfor %}"""

CALL_TEMPLATES = {
    "channels": _CHANNELS,
    "function": _FUNCTION,
    "named": _NAMED,
    "named inline": _NAMED.replace("\n", "").replace("'\\n'", "''"),
    "list": _LIST,
    "lines": _LINES,
    "actions": _ACTIONS,
    "named line": _NAMED_LINE,
    "gemma": _GEMMA,
    "deepseek": _DEEPSEEK,
    "deepseek fenced": _FENCED,
    "json": _JSON,
    "mistral": _MISTRAL,
    "mistral list": _MISTRAL_LIST,
    "bare parameters": _BARE,
}
"""By the name of the form."""


def answer_of(form: str, calls: Sequence[ToolCall], said: str = "") -> str:
    """As the template of a form writes it."""
    if form == "channels":
        return _TEMPLATES[form].render(calls=calls, said=said)
    return said + _TEMPLATES[form].render(calls=calls)


_ENVIRONMENT = jinja2.Environment(keep_trailing_newline=True)
_ENVIRONMENT.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
_TEMPLATES = {name: _ENVIRONMENT.from_string(text) for name, text in CALL_TEMPLATES.items()}


def cut(text: str, cuts: Sequence[int]) -> list[str]:
    """At these places, counted round and round."""
    places = sorted({0, len(text), *(each % (len(text) + 1) for each in cuts)})
    return [text[a:b] for a, b in pairwise(places)]


def parts_of(
    pieces: Sequence[str],
    form: AnswerForm | None = None,
    *,
    thinking: bool = False,
    tools: ToolTypes | None = None,
) -> list[AnswerPart]:
    """With neighbouring text as one part, as a reader joins it."""
    parser = AnswerParser(form, thinking=thinking, tools=tools)
    found: list[AnswerPart] = []
    for part in [*(part for piece in pieces for part in parser.feed(piece)), *parser.finish()]:
        last = found[-1] if found else None
        if isinstance(part, Said) and isinstance(last, Said):
            found[-1] = Said(last.text + part.text)
        elif isinstance(part, Thought) and isinstance(last, Thought):
            found[-1] = Thought(last.text + part.text)
        else:
            found.append(part)
    return found


_WORDS = ("red", "green", "a b", 'q"uote', "naïve", "back\\slash", "")
_PATTERNS = ("^[a-f]{1,4}$", "^(yes|no)$", "^[0-9]{2}-[A-Z]$")
_FORMATS = ("date", "ipv4", "uuid")


def random_schema(seed: int, *, depth: int = 3) -> dict[str, Any]:
    """The same for the same seed."""
    draw = random.Random(seed)
    schema = _value(draw, depth)
    if draw.random() < 0.3:
        return {"$defs": {"item": _scalar(draw), "whole": schema}, "$ref": "#/$defs/whole"}
    return schema


def _value(draw: random.Random, depth: int) -> dict[str, Any]:
    if depth == 0 or draw.random() < 0.25:
        return _scalar(draw)
    return draw.choice((_object, _object, _array, _any_of))(draw, depth - 1)


def _object(draw: random.Random, depth: int) -> dict[str, Any]:
    names = [f"{draw.choice('abcxyz')}{number}" for number in range(draw.randint(1, 4))]
    return {
        "type": "object",
        "properties": {name: _value(draw, depth) for name in names},
        "required": [name for name in names if draw.random() < 0.7],
        "additionalProperties": False,
    }


def _array(draw: random.Random, depth: int) -> dict[str, Any]:
    least = draw.randint(0, 2)
    schema = {"type": "array", "minItems": least, "maxItems": least + draw.randint(0, 2)}
    if draw.random() < 0.3:
        schema["prefixItems"] = [_scalar(draw), _scalar(draw)]
    return {**schema, "items": _value(draw, depth)}


def _any_of(draw: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_value(draw, depth), _scalar(draw)]}


def _scalar(draw: random.Random) -> dict[str, Any]:
    low = draw.randint(-50, 50)
    high = low + draw.randint(0, 2000)
    kinds: tuple[dict[str, Any], ...] = (
        {"type": "integer", "minimum": low, "maximum": high},
        {"type": "integer", "exclusiveMinimum": low, "maximum": high + 1},
        {"type": "integer", "minimum": 0, "maximum": 1000, "multipleOf": draw.randint(2, 9)},
        {"type": "string", "minLength": draw.randint(0, 2), "maxLength": draw.randint(2, 8)},
        {"type": "string", "pattern": draw.choice(_PATTERNS)},
        {"type": "string", "format": draw.choice(_FORMATS)},
        {"enum": [*draw.sample(_WORDS, 3), draw.randint(-9, 9), None]},
        {"const": {"is": draw.choice(_WORDS), "n": [draw.randint(0, 9), 0.5]}},
        {"type": ["boolean", "null"]},
    )
    return draw.choice(kinds)
