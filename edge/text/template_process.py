"""Runs chat templates for `chat_template.py`: a separate program under limits of the kernel.

A template is an untrusted program. Jinja's sandbox keeps it from the interpreter, but not from
endless loops or from filling memory: one `'a' * 10**10` is a single instruction that nothing in the
same process can stop. So the kernel limits the whole process, which writes no files and starts no
processes.

A request is JSON: {"source": the template, "values": its names}. A reply is a line with one word,
and text after it: "rendered" and the prompt; "invalid", "refused" or "exhausted" and the cause.

Imports almost nothing of Edge: it starts in 0.1 s, most of which is Jinja's.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

if __name__ == "__main__":
    sys.path.append(sys.argv[4])  # the folder of Edge's package, which may be no usual one

from edge.system.confinement import read_time_zone, serve

_LONGEST_CAUSE = 1000


def main() -> None:
    read_time_zone()  # for `strftime_now`
    datetime.now().strftime("%c")
    most_bytes = int(sys.argv[3])
    jinja = environment()
    compiled: dict[str, jinja2.Template] = {}
    serve(lambda request: _reply(jinja, compiled, request, most_bytes))


def _reply(
    jinja: jinja2.Environment, compiled: dict[str, jinja2.Template], request: bytes, most_bytes: int
) -> bytes:
    try:
        asked = json.loads(request)
        del request
        source = asked["source"]
        if source not in compiled:
            try:
                compiled[source] = jinja.from_string(source)
            except (jinja2.TemplateError, SyntaxError, ValueError) as error:
                return _failed(b"invalid", error)
        prompt = compiled[source].render(asked["values"]).encode("utf-8", "surrogatepass")
        if len(prompt) > most_bytes:
            return b"exhausted\nits output is longer than %d bytes" % most_bytes
        return b"rendered\n" + prompt
    except (MemoryError, OverflowError):  # also of a range that the sandbox forbids
        return b"exhausted\nit asked for too much memory"
    except RecursionError:
        return b"exhausted\nit calls itself too deeply"
    except Exception as error:  # a template can fail in any way
        return _failed(b"refused", error)


def _failed(kind: bytes, error: Exception) -> bytes:
    cause = (str(error) or type(error).__name__)[:_LONGEST_CAUSE]
    return kind + b"\n" + cause.encode("utf-8", "replace")


def environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=_strftime_now,
        dict=_DictMaker(),
        namespace=_TemplateNamespace,
    )
    return environment


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}`, a mark for training; renders its content."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own interface

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _TemplateNamespace(Namespace):
    """Jinja's namespace without underscore names, which could reach into the interpreter."""

    def __init__(*args: Any, **values: Any) -> None:
        # No named parameters, as in Jinja's own, so that a template may store any name.
        self, *rest = args
        stored = dict(*rest, **values)
        for name in stored:
            _check_name(name)
        Namespace.__init__(self, stored)

    def __setitem__(self, name: str, value: object) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace may not hold the name {name!r}")


class _DictMaker:
    """`dict(...)` and `dict.fromkeys(...)` for templates, without other attributes."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, names: Iterable[Any], value: object = None) -> dict[Any, Any]:
        return dict.fromkeys(names, value)


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    """The local time, because templates write today's date into the prompt."""
    return datetime.now().strftime(pattern)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes, as models were trained on; Jinja's own filter escapes."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


if __name__ == "__main__":
    main()
