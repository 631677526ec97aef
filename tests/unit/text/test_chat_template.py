"""Chats become the prompts that `transformers` makes of them."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from edge.errors import CheckpointError, RequestError
from edge.text import Tokenizer
from tests.architecture.test_names import REPOSITORY
from tests.support.small_tokenizers import (
    CHAT_TEMPLATE,
    byte_level,
    write_checkpoint,
)

_opened: list[Tokenizer] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    while _opened:
        _opened.pop().close()


def opened(path: Path) -> Tokenizer:
    _opened.append(Tokenizer.open(path))
    return _opened[-1]


MESSAGES = [
    {"role": "system", "content": "  Be brief.  "},
    {"role": "user", "content": 'Größe <b>"x"</b> & 🎉?'},
]
TEMPLATES = {
    "plain": CHAT_TEMPLATE,
    "blocks": (
        "  {% if messages[0]['role'] == 'system' %}\n"
        "    {%- set rest = messages[1:] %}\nsystem: {{ messages[0]['content'] }}\n"
        "  {% endif %}\n"
        "{% for m in rest %}{% if loop.index0 > 3 %}{% break %}{% endif %}"
        "{{ m | tojson }}{% if not loop.last %}{% continue %}{% endif %}last{% endfor %}"
        "{{ tools is none }} {{ documents is none }} "
        "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}"
    ),
    "helpers": (
        "{% set ns = namespace(found=false, n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
        "{% endfor %}{{ ns.n }}{{ dict(a=1, b=messages[1].content) | tojson(indent=2) }}"
        "{{ dict.fromkeys(['k'], 3) | tojson }}"
        "{% generation %}{{ messages[1].content }}{% endgeneration %}{{ undefined_name }}"
        "{{ messages[0] | items | list }}{{ strftime_now('%Z') | length }}"
    ),
}


@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES.keys())
@pytest.mark.parametrize("layout", ["settings", "named", "file"])
def test_chats_are_those_of_transformers(tmp_path: Path, source: str, layout: str) -> None:
    settings: dict[str, Any] = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
    if layout == "settings":
        settings["chat_template"] = source
    elif layout == "named":
        settings["chat_template"] = [
            {"name": "tool_use", "template": "tools: {{ tools | tojson }}"},
            {"name": "default", "template": source},
        ]
    else:
        settings["chat_template"] = "the file goes first"
    write_checkpoint(tmp_path, byte_level(), settings)
    if layout == "file":
        (tmp_path / "chat_template.jinja").write_text(source)
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), opened(tmp_path)
    for prompt in (True, False):
        assert ours.chat(MESSAGES, add_generation_prompt=prompt) == theirs.apply_chat_template(
            MESSAGES, add_generation_prompt=prompt, tokenize=False
        )
    assert ours.encode_chat(MESSAGES) == theirs.apply_chat_template(
        MESSAGES, add_generation_prompt=True, return_dict=False
    )
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert ours.chat(MESSAGES, tools=tools) == theirs.apply_chat_template(
        MESSAGES, add_generation_prompt=True, tokenize=False, tools=tools
    )


def test_chat_variables_absent_values_and_reasoning_reach_the_template(tmp_path: Path) -> None:
    template = (
        "{{ enable_thinking }} {{ 'content' in messages[0] }} {{ messages[0].reasoning_content }}"
    )
    write_checkpoint(tmp_path, byte_level(), {"chat_template": template})
    messages = [{"role": "assistant", "content": None, "reasoning": "hm"}]
    ours = opened(tmp_path)
    assert ours.chat(messages, variables={"enable_thinking": False}) == "False False hm"
    assert ours.chat(
        messages, variables={"enable_thinking": False}
    ) == AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        messages, tokenize=False, enable_thinking=False
    )


@pytest.mark.parametrize("name", ["enable_thinking", "thinking"])
def test_whether_the_model_thinks_is_told_by_the_name_that_the_template_heeds(
    tmp_path: Path, name: str
) -> None:
    source = f"{{{{ messages[0].content }}}}{{% if {name} is defined and {name} is false %}}at once"
    write_checkpoint(tmp_path, byte_level(), {"chat_template": source + "{% endif %}"})
    messages = [{"role": "user", "content": "Hello"}]
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), opened(tmp_path)
    for told, values in ((None, {}), (True, {name: True}), (False, {name: False})):
        assert ours.chat(messages, thinking=told) == theirs.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **values
        )
    assert ours.chat(messages, thinking=False) == "Helloat once"


@pytest.mark.parametrize("told", [True, False])
def test_a_template_without_a_switch_for_thinking_says_so(tmp_path: Path, told: bool) -> None:
    write_checkpoint(tmp_path, byte_level(), {"chat_template": CHAT_TEMPLATE})
    with pytest.raises(RequestError, match=r"has no switch for thinking; leave it"):
        opened(tmp_path).chat(MESSAGES, thinking=told)


def test_the_template_writes_all_special_tokens_of_a_chat(tmp_path: Path) -> None:
    settings = {"bos_token": "<|begin|>", "chat_template": CHAT_TEMPLATE}
    ours = opened(write_checkpoint(tmp_path, byte_level(), settings))
    begin = ours.token_id("<|begin|>")
    assert begin is not None
    assert ours.encode_chat(MESSAGES).count(begin) == 1
    assert ours.encode(ours.chat(MESSAGES)).count(begin) == 2


BEGUN = """{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}\
{% if add_generation_prompt %}<assistant>{% endif %}"""


@pytest.mark.parametrize(
    ("template", "content", "prompt"),
    [
        (BEGUN, "It is", "<user>Hi</><assistant>It is"),
        (BEGUN, "It is </> ", "<user>Hi</><assistant>It is </> "),
        (BEGUN, "  Hi", "<user>Hi</><assistant>Hi"),
        (BEGUN, " ", "<user>Hi</><assistant>"),
        (BEGUN, None, "<user>Hi</><assistant>"),
        (BEGUN.replace("m.content", "m.content[:2]"), "It is", None),
    ],
)
def test_an_answer_that_was_begun_is_gone_on_with(
    tmp_path: Path, template: str, content: str | None, prompt: str | None
) -> None:
    ours = opened(write_checkpoint(tmp_path, byte_level(), {"chat_template": template}))
    asked = {"role": "user", "content": "Hi"}
    messages: list[dict[str, Any]] = [asked, {"role": "assistant", "content": content}]
    if prompt is None:
        with pytest.raises(RequestError, match="cannot continue an answer; end the messages"):
            ours.chat(messages)
    else:
        assert ours.chat(messages) == prompt
        assert ours.encode_chat(messages) == ours._encode(prompt, add_special_tokens=False)
    calls = [{"function": {"name": "f", "arguments": {}}}]
    called = ours.chat([asked, {**messages[1], "content": "x", "tool_calls": calls}])
    assert called.endswith("x</><assistant>"), "a call is whole"


def test_a_switch_for_thinking_is_seen_where_no_answer_begins(tmp_path: Path) -> None:
    switch = "{% if enable_thinking is false %}at once{% endif %}"
    template = BEGUN.replace("<assistant>{% endif %}", f"<assistant>{switch}{{% endif %}}")
    ours = opened(write_checkpoint(tmp_path, byte_level(), {"chat_template": template}))
    asked = {"role": "user", "content": "Hi"}
    answered = [asked, {"role": "assistant", "content": "It is"}]
    assert ours.chat([asked], thinking=False) == "<user>Hi</><assistant>at once"
    for told in (True, False):
        assert ours.chat(answered, thinking=told) == "<user>Hi</><assistant>It is"
        assert ours.chat(answered, False, thinking=told) == "<user>Hi</><assistant>It is</>"


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (None, MESSAGES, "has no default chat template"),
        ([{"name": "rag", "template": "x"}], MESSAGES, r"no default .* \(only rag\); send"),
        (CHAT_TEMPLATE, [], "at least one message"),
        (CHAT_TEMPLATE, ["hello"], "an object with role and content, not 'hello'"),
        (CHAT_TEMPLATE, ["x" * 5000], r"an object with role and content, not '.{,80}; write"),
        (CHAT_TEMPLATE, [{"role": "user", "content": b"x"}], "text, numbers, .* not bytes"),
        ("{{ raise_exception('roles must alternate') }}", MESSAGES, "roles must alternate"),
        ("{{ 1 // 0 }}", MESSAGES, "refused these messages: .*zero"),
        ("{{ messages.nothing.further }}", MESSAGES, "refused these messages"),
        ("{{ messages.append(1) }}", MESSAGES, "refused these messages: .*unsafe"),
        ("{{ ''.__class__.__mro__ }}", MESSAGES, "refused these messages: .*unsafe"),
        ("{{ strftime_now.__globals__['os'] }}", MESSAGES, "refused these messages: .*unsafe"),
        ("{% set n = namespace(__x=1) %}", MESSAGES, "may not hold the name '__x'"),
        ("{% set n = namespace() %}{% set n._x = 1 %}", MESSAGES, "may not hold the name '_x'"),
    ],
)
def test_a_chat_that_cannot_be_rendered_is_the_callers_error(
    tmp_path: Path, template: Any, messages: Any, message: str
) -> None:
    ours = opened(
        write_checkpoint(tmp_path, byte_level(), {"chat_template": template} if template else {})
    )
    with pytest.raises(RequestError, match=message) as raised:
        ours.chat(messages)
    assert str(tmp_path.parent) not in str(raised.value), "clients of a server read it"


def test_a_template_that_is_not_jinja_hinders_only_chats(tmp_path: Path) -> None:
    settings = {"chat_template": "{% if %}"}
    ours = opened(write_checkpoint(tmp_path, byte_level(), settings))
    assert ours.encode("fox")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: .* not valid Jinja"):
        ours.chat(MESSAGES)


def test_modules_beside_an_installed_edge_do_not_replace_those_of_python(tmp_path: Path) -> None:
    """As old backports of parts of the standard library would in a folder of packages."""
    (tmp_path / "edge").symlink_to(REPOSITORY / "edge")
    (tmp_path / "json.py").write_text("raise ImportError")
    program = (
        "import json, sys\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "from edge.text.chat_template import ChatTemplate\n"
        "template = ChatTemplate('{{ messages[0].content }}', origin='here')\n"
        "said = [{'role': 'user', 'content': 'Hello'}]\n"
        "more = {'tools': None, 'variables': {}}\n"
        "print(template.render(said, add_generation_prompt=True, **more))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-P", "-c", program],
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (0, "Hello\n"), ended.stderr
