"""Chat templates: messages to the prompt format that a model was trained on.

Knows the names that templates expect (those of `transformers`), but neither tokens nor Jinja. A
template is an untrusted program from the checkpoint: it sees copies of plain data only, in a
process of its own (`template_process.py`) with limits of time and memory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

from edge.errors import CheckpointError, RequestError
from edge.system.confinement import TimeLimit
from edge.system.processes import own_session
from edge.text.template_turns import template_turns

_PROGRAM = Path(__file__).with_name("template_process.py")
_CPU_S = 1.5
"""Seconds of CPU to compile and render a template; published ones take 0.1 s together."""
_WALL_S = 60.0
"""Seconds of wall time, for a process that uses no CPU time."""
_MEMORY_BYTES = 512 << 20
_MAX_TEXT_BYTES = 32 << 20
"""Most bytes of the messages, and of the prompt."""
_MAX_SOURCE_CHARACTERS = 1 << 20  # the longest published one has 20,000
_LENGTH_BYTES = 8
_ENVIRONMENT = ("HOME", "LANG", "LC_ALL", "LC_TIME", "LD_LIBRARY_PATH", "SYSTEMROOT", "TZ")


class ChatTemplate:
    """A chat template. Its process starts with the first chat; `close` ends it."""

    def __init__(self, source: str, origin: str) -> None:
        """origin: the file that it comes from. Raises CheckpointError for a template that is too
        long."""
        if len(source) > _MAX_SOURCE_CHARACTERS:
            raise CheckpointError(
                f"{origin}: the chat template has {len(source):,} characters, and "
                f"{_MAX_SOURCE_CHARACTERS:,} are the most that are read"
            )
        self._source = source
        self._origin = origin
        self._process = _TemplateProcess()

    @property
    def source(self) -> str:
        """The Jinja source."""
        return self._source

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, object]] | None,
        variables: Mapping[str, object],
    ) -> str:
        """The prompt as text. variables: further names for the template.

        Raises RequestError for data that JSON cannot hold, and for messages that the template
        refuses; CheckpointError, naming `origin`, for a template that is not valid Jinja or exceeds
        the limits of time and memory.
        """
        values: dict[str, object] = {"documents": None, **variables}
        values["tools"] = tools
        values["add_generation_prompt"] = add_generation_prompt
        try:
            values = _plain_object(values)
            values["messages"] = template_turns(self._source, [*map(_plain_object, messages)])
            request = json.dumps({"source": self._source, "values": values}).encode()
        except RequestError:
            raise
        except (ValueError, RecursionError) as error:
            raise RequestError(
                f"the chat messages cannot be written as JSON: {error}", remedy="use JSON's types"
            ) from error
        if len(request) > _MAX_TEXT_BYTES:
            raise RequestError(
                f"the chat messages are longer than {_MAX_TEXT_BYTES >> 20} MiB as JSON",
                remedy="send less",
            )
        kind, text = self._process.ask(request)
        if kind == "rendered":
            return text
        if kind == "refused":
            raise RequestError(
                f"the model's chat template refused these messages: {text}",
                remedy="change the roles or their order",
            )
        remedy = "replace it with the one of the model's publisher"
        if kind == "invalid":
            raise CheckpointError(
                f"{self._origin}: the chat template is not valid Jinja ({text})", remedy=remedy
            )
        raise CheckpointError(
            f"{self._origin}: the chat template cannot be used ({text or 'its process ended'})",
            remedy=remedy,
        )

    def close(self) -> None:
        """End its process; another chat starts a new one."""
        self._process.close()


class _TemplateProcess:
    """The process that renders templates: thread-safe, one request at a time, started on demand."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._running: subprocess.Popen[bytes] | None = None
        self._stop: weakref.finalize[..., object] | None = None

    def ask(self, request: bytes) -> tuple[str, str]:
        """The kind of the reply and its text; "exhausted": a limit ended the process."""
        with self._mutex:
            if self._running is None:
                self._start()
            process = self._running
            assert process is not None, "just started"
            try:
                reply = _exchange(process, request)
                kind, _, text = reply.partition(b"\n")
                return kind.decode(), text.decode("utf-8", "surrogatepass")
            except (OSError, EOFError, ValueError) as error:
                self._end()
                return "exhausted", _cause(process, error)
            except BaseException:  # the next request must not get this one's reply
                self._end()
                raise

    def close(self) -> None:
        """End the process; the next request starts a new one."""
        with self._mutex:
            self._end()

    def _end(self) -> None:
        if self._stop is not None:
            self._stop()
        self._running = self._stop = None

    def _start(self) -> None:
        kept = {
            name: value
            for name, value in os.environ.items()
            if name in _ENVIRONMENT or name.startswith("PYTHON")
        }
        limits = map(str, (_CPU_S, _MEMORY_BYTES, _MAX_TEXT_BYTES))
        self._running = subprocess.Popen(
            [sys.executable, "-P", str(_PROGRAM), *limits, str(_PROGRAM.parents[2])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            cwd="/",
            env=kept,
            **own_session(),
        )
        self._stop = weakref.finalize(self, _stop, self._running)


def _exchange(process: subprocess.Popen[bytes], request: bytes) -> bytes:
    """Send a request and read the reply. Raises EOFError or OSError if the process has ended,
    ValueError for an invalid reply."""
    requests, replies = process.stdin, process.stdout
    assert requests is not None, "a pipe"
    assert replies is not None, "a pipe"
    rest = memoryview(len(request).to_bytes(_LENGTH_BYTES, "little") + request)
    is_late = threading.Event()

    def end_it() -> None:
        is_late.set()
        process.kill()

    def read(count: int) -> bytes:
        content = bytearray()
        while len(content) < count:
            part = os.read(replies.fileno(), min(count - len(content), 1 << 20))
            if not part:
                raise EOFError
            content += part
        return bytes(content)

    limit = threading.Timer(_WALL_S, end_it)  # not every system can wait for pipes with a limit
    limit.daemon = True
    limit.start()
    try:
        while rest:
            rest = rest[requests.write(rest) :]
        length = int.from_bytes(read(_LENGTH_BYTES), "little")
        if length > _MAX_TEXT_BYTES + 100:
            raise ValueError(f"it wrote {length:,} bytes")
        return read(length)
    except (EOFError, OSError):
        if is_late.is_set():
            raise ValueError(f"it did not answer within {_WALL_S:.0f} s") from None
        raise
    finally:
        limit.cancel()


def _stop(process: subprocess.Popen[bytes]) -> None:
    with process:  # closes its pipes and waits for it
        process.kill()


def _cause(process: subprocess.Popen[bytes], error: Exception) -> str:
    if TimeLimit.ended(process.returncode):
        return f"it takes more than {_CPU_S} s"
    return str(error) if isinstance(error, ValueError) else ""


def _plain_object(message: Mapping[str, object]) -> dict[str, object]:
    """A copy in JSON's types, as methods of other objects could escape the sandbox."""
    return {str(_plain(name)): _plain(item) for name, item in message.items()}


def _plain(value: object) -> object:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Mapping):
        return {_plain(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    raise RequestError(
        f"chat messages may hold text, numbers, lists and objects, not {type(value).__name__}",
        remedy="give one of these",
    )
