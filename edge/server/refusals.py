"""Errors of requests, in the format of each dialect."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from edge.errors import CapacityError, EdgeError, PeerError, PromptLengthError, RequestError

_log = logging.getLogger(__name__)

Dialect = Literal["openai", "anthropic", "ollama"]

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
CONTEXT_CODE = "context_length_exceeded"
"""OpenAI's error code for a prompt that does not fit."""

RETRY_AFTER_S = 2
"""Seconds until a client should try again. Room comes soon, when other answers end."""


@dataclass(slots=True)
class Refusal(Exception):  # noqa: N818 - it is an answer, not a defect
    """An HTTP status, a sentence, and the field of the request that it is about."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    closes: bool = False
    """Whether the connection is closed after the refusal."""
    said_as: Mapping[Dialect, str] = field(default_factory=dict)
    """Other sentences, for dialects whose clients look for certain words."""

    def said_in(self, dialect: Dialect) -> str:
        return self.said_as.get(dialect, self.message)

    def body(self, dialect: Dialect) -> dict[str, Any]:
        kind = _KINDS.get(self.status, "api_error")
        message = self.said_in(dialect)
        if dialect == "anthropic":
            return {"type": "error", "error": {"type": kind, "message": message}}
        if dialect == "ollama":
            return {"error": message}
        return {
            "error": {
                "message": message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }

    @property
    def headers(self) -> dict[str, str]:
        found = {"Connection": "close"} if self.closes else {}
        if self.status in {429, 503}:
            found["Retry-After"] = str(RETRY_AFTER_S)
        elif self.status == 401:
            found["WWW-Authenticate"] = "Bearer"
        return found


def _too_long(error: PromptLengthError) -> Mapping[Dialect, str]:
    """Sentences by which agents recognise that they must shorten the conversation."""
    tokens, most = error.prompt_tokens, error.context_tokens
    return {
        "openai": f"This model's maximum context length is {most} tokens. However, your messages "
        f"resulted in {tokens} tokens. Please reduce the length of the messages.",
        "anthropic": f"prompt is too long: {tokens} tokens > {most} maximum",
    }


def refusal_of(error: EdgeError) -> Refusal:
    """The refusal that a client gets for an error of the engine."""
    if isinstance(error, PromptLengthError):
        return Refusal(400, str(error), code=CONTEXT_CODE, said_as=_too_long(error))
    if isinstance(error, RequestError):
        return Refusal(400, str(error))
    if isinstance(error, CapacityError | PeerError):
        return Refusal(503, str(error))
    _log.error("a model cannot be used: %s", error)  # with the folders of its files
    return Refusal(500, f"the model cannot be used as it is: {_without_folders(str(error))}")


_FOLDERS = re.compile(
    r"(?<![\w./~\\-])~?[/\\][^\n:]*[/\\](?=[^/\\\s])"  # absolute, also with spaces in it
    r"|\b[A-Za-z]:[/\\](?:[^\n:]*[/\\])?(?=[^/\\\s])"
    r"|(?<![\w./~\\-])(?:[\w.~-]+[/\\])+(?=[\w.-]+\.(?:gguf|json|safetensors|jinja|txt|model)\b)"
)
"""Folders of paths in an error. Words between two paths go as well: no folder may remain."""


def _without_folders(text: str) -> str:
    """The text with file names in place of paths, which clients need not know."""
    return _FOLDERS.sub("", text)
