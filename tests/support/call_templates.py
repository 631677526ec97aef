"""Chat templates that write calls in the forms that models are taught, as short as can be.

Each is given `said` and `calls`, which have a name and arguments, and writes an answer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import jinja2

from edge.text.answer_parts import ToolCall

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
