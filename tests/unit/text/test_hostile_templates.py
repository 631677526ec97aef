"""A chat template that loops, fills memory or calls itself is stopped, and the next chat works."""

import contextlib
import resource
from collections.abc import Iterator

import pytest

from edge.errors import CheckpointError, RequestError
from edge.text import chat_template
from edge.text.chat_template import ChatTemplate

MESSAGES = [{"role": "user", "content": "x"}]

DOUBLED = (
    "{% set n = namespace(a=[1]) %}{% for i in range(60) %}{% set n.a = [n.a, n.a] %}{% endfor %}"
)

ATTACKS = {
    "range": ("{% for i in range(10**9) %}{% endfor %}", "too much memory"),
    "loops": (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "takes more than",
    ),
    "doubled list": (DOUBLED + "{{ n.a | tojson }}", "takes more than"),
    "text at compile time": ("{{ 'a' * 10**10 }}", "too much memory"),
    "text": ("{{ messages[0].content * 10**10 }}", "too much memory"),
    "power": ("{{ 7 ** (9 ** 9 * messages | length) > 1 }}", "takes more than|too much"),
    "width": ("{{ '%1000000000d' | format(1) }}", "too much memory"),
    "width of format": ("{{ '{:>9999999999}'.format(1) }}", "too much memory"),
    "center": ("{{ 'a' | center(10000000000) }}", "too much memory"),
    "join": ("{{ range(99999) | join('a' * 1000000) }}", "too much memory"),
    "batch": ("{% for x in [1] | batch(1000000000, 0) %}{% endfor %}", "too much memory"),
    "indent": ("{{ [1] | tojson(indent=10000000000) }}", "too much memory"),
    "macro": ("{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}", "too deeply"),
    "brackets": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "too deeply"),
    "blocks": ("{% if 1 %}" * 3000 + "{% endif %}" * 3000, "too deeply"),
    "output": ("{{ 'a' * 40000000 }}", "output is longer"),
}


@contextlib.contextmanager
def template(source: str) -> Iterator[ChatTemplate]:
    with contextlib.closing(ChatTemplate(source, "there.jinja")) as opened:
        yield opened


def chat(opened: ChatTemplate, **variables: object) -> str:
    return opened.render(MESSAGES, add_generation_prompt=True, tools=None, variables=variables)


@pytest.mark.parametrize(("source", "cause"), ATTACKS.values(), ids=ATTACKS.keys())
def test_it_is_stopped(source: str, cause: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Where another limit ends it, a slow machine must not reach that one first.
    monkeypatch.setattr(chat_template, "_CPU_S", 0.4 if "takes more than" in cause else 60.0)
    before = resource.getrusage(resource.RUSAGE_SELF)
    with template(source) as opened, pytest.raises(CheckpointError, match=cause) as caught:
        chat(opened)
    assert str(caught.value).startswith("there.jinja: ")
    assert len(str(caught.value)) < 1500
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert after.ru_maxrss - before.ru_maxrss < 100 << 10, "KiB of this process"
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert children.ru_maxrss < 600 << 10 or before.ru_maxrss > 500 << 10


def test_the_next_chat_works() -> None:
    source = "{% if loops %}{{ messages[0].content * 10**10 }}{% endif %}{{ messages[0].content }}"
    with template(source) as opened:
        with pytest.raises(CheckpointError):
            chat(opened, loops=True)
        assert chat(opened) == "x"


def test_what_a_template_says_is_short() -> None:
    source = "{{ raise_exception('a' * 1000000) }}"
    with template(source) as opened, pytest.raises(RequestError) as caught:
        chat(opened)
    assert len(str(caught.value)) < 1500


def test_a_process_that_is_killed_is_started_again() -> None:
    with template("{{ messages[0].content }}") as opened:
        assert chat(opened) == "x"
        running = opened._process._running
        assert running is not None
        running.kill()
        with pytest.raises(CheckpointError, match="its process ended"):
            chat(opened)
        assert chat(opened) == "x"


def test_a_template_without_end_and_messages_without_end_are_refused() -> None:
    with pytest.raises(CheckpointError, match="1,048,577 characters"):
        ChatTemplate("x" * ((1 << 20) + 1), "there.jinja")
    with template("x") as opened, pytest.raises(RequestError, match="longer than 32 MiB"):
        chat(opened, long="x" * (33 << 20))
